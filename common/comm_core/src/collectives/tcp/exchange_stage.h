// Direct exchange: a block to each of some ranks and a block from each of some, all at once. One
// hop, and what small messages, all_to_all, gather and scatter are made of.
#pragma once

#include <vector>

#include "collectives/stage.h"
#include "tcp/link.h"

namespace comm_core {

class Group;

class ExchangeStage : public Stage {
 public:
  struct Sending {
    int peer;
    ConstSpan block;
  };
  struct Receiving {
    int peer;
    Span block;
  };
  ExchangeStage(Group& group, FrameHeader frame, std::vector<Sending> sending,
                std::vector<Receiving> receiving);
  Progress step() override;
  std::string status() const override;

 private:
  struct Transfer {
    int peer;
    char* data;
    size_t bytes;
    size_t done = 0;  // header included
    bool finished = false;
  };
  bool send(Transfer& transfer);
  bool receive(Transfer& transfer);

  Group& group_;
  FrameHeader frame_;
  std::vector<Transfer> out_, in_;
};

}  // namespace comm_core
