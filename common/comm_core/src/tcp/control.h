// A star of connections to rank 0, over which ranks learn that one has failed, died or left. It
// carries no payload and is quiet while all is well.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tcp/link.h"

namespace comm_core {

class Group;

class Control {
 public:
  explicit Control(Group& group);
  ~Control();

  // Rank 0: the connection of `peer`. Others connect themselves.
  void accept(int peer, Fd fd);
  bool connected() const;

  // Tells everybody that the group has failed, and why.
  void tell_failure(const std::string& reason);
  // Tells rank 0 what this rank has been waiting in for long.
  void show(const FrameHeader& frame);
  // Tells everybody that this rank leaves in peace, after the collective with that number.
  void tell_goodbye(uint64_t finished);

 private:
  class Line;
  friend class Line;
  enum class Kind : uint8_t { failure, goodbye, waiting };
  struct Message {
    uint32_t magic;
    Kind kind;
    uint8_t pad;
    uint16_t text_bytes;
    int32_t from;
  };

  void heard(int line, Kind kind, int from, const std::string& text);
  void lost(int line, const std::string& reason);
  void send_all(Kind kind, int from, const std::string& text, int except);

  Group& group_;
  std::vector<std::unique_ptr<Line>> lines_;  // rank 0: one for each rank; others: [0] only
  std::vector<bool> left_;
  std::string farewells_;  // for ranks that connect only after others have left
};

}  // namespace comm_core
