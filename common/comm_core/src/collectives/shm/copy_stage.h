// all_gather, broadcast, gather, scatter, all_to_all and barrier between the ranks of one host:
// senders write rounds of their blocks into their streams, receivers copy them out.
#pragma once

#include <vector>

#include "collectives/stage.h"
#include "shm/streams.h"

namespace comm_core {

struct ShmCopyPlan {
  FrameHeader frame;
  // One block for everybody (multicast: outputs[0]), or one for each local rank.
  bool multicast = true;
  std::vector<ConstSpan> outgoing;
  // What is expected from each local rank.
  std::vector<Span> incoming;
  // How many rounds each rank's stream has in this stage; kUntilLast: until it says so.
  static constexpr int64_t kUntilLast = -1;
  std::vector<int64_t> rounds;
  // Whose rounds concern this rank; the others are skipped without a look.
  std::vector<bool> listens;
  // Bytes of one receiver in a round, if each gets a block of his own, and how many share a slot.
  size_t portion = 0;
  bool streaming = false;
};

class ShmCopyStage : public Stage {
 public:
  ShmCopyStage(ShmStreams& streams, ShmCopyPlan plan, std::vector<std::string> peers);
  Progress step() override;
  std::string status() const override;

  // Rounds that blocks of at most `bytes` need; never 0, so that every sender is checked.
  static int64_t rounds_for(size_t bytes, size_t portion);

 private:
  bool produce();
  bool consume(int r);
  // The place of reader r among the portions of a slot of writer w.
  size_t place(int r, int w) const;

  ShmStreams& streams_;
  ShmCopyPlan plan_;
  std::vector<std::string> peers_;
  int64_t produced_ = 0;
  std::vector<int64_t> consumed_;
  std::vector<bool> finished_;
};

}  // namespace comm_core
