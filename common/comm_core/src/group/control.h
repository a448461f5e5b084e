// Two stars of connections, to ranks 0 and 1, over which ranks learn that one has failed, died or
// left: two, for one that hangs passes nothing on. They carry no payload and are quiet while all is
// well.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/frame.h"
#include "transport/device.h"

namespace comm_core {

class Group;

class Control {
 public:
  explicit Control(Group& group);
  ~Control();

  // Ranks 0 and 1: the connection of `peer`, which has a higher number. Others connect themselves.
  void enter(int peer, Arrival& arrival);
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

  static std::string packed(Kind kind, int from, const std::string& text);
  void heard(int line, Kind kind, int from, const std::string& text);
  void lost(int line, const std::string& reason);
  void send_all(Kind kind, int from, const std::string& text, int except);

  bool passes_on() const;

  Group& group_;
  std::vector<std::unique_ptr<Line>> lines_;  // by rank; of most ranks only to 0 and 1
  std::vector<bool> left_;
  bool failed_ = false;    // all have been told why
  std::string farewells_;  // for ranks that connect only after others have left
};

}  // namespace comm_core
