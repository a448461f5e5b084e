// Control connections, over which all ranks learn that a rank has failed, died or left. Every rank
// is connected to the two hubs, ranks 0 and 1, which forward the reports. There are two because a
// hub that hangs forwards nothing. Without failures, only farewells and slow operations cause
// traffic.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/frame.h"
#include "transport/device.h"

namespace comm_core {

class Group;

// Owns the control connections of its group, which must outlive it. Belongs to the thread that
// drives the engine.
class Control {
 public:
  explicit Control(Group& group);
  ~Control();

  // Takes over the connection of `peer`, a higher rank, on a hub. Other ranks connect themselves.
  void enter(int peer, Arrival& arrival);
  // Returns a rank whose connection to this one is not authenticated yet; -1 if all are.
  int absent() const;

  // Reports to all ranks that the group has failed, with the reason, which they get as a
  // MismatchError or as an AbortedError.
  void tell_failure(const std::string& reason, bool mismatch);
  // Reports to all ranks a failure for which this process may end. Whoever loses this rank later
  // knows why.
  void tell_trouble(const std::string& reason);
  // Handles the reports that have arrived.
  void listen();
  // Reports to rank 0 the collective in which this rank has been waiting for long.
  void show(const FrameHeader& frame);
  // Reports to all ranks that this rank leaves, after the collective with sequence number
  // `finished`.
  void tell_goodbye(uint64_t finished);

 private:
  class Line;
  friend class Line;
  enum class Kind : uint8_t { failure, goodbye, waiting, mismatch, lost, trouble };
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
  void told_lost(int peer, const std::string& reason);
  void send_all(Kind kind, int from, const std::string& text, int except);

  bool passes_on() const;

  Group& group_;
  std::vector<std::unique_ptr<Line>> lines_;  // by rank; only hubs have more than two
  std::vector<bool> left_, lost_;             // by rank: with a farewell, or without
  std::vector<bool> troubled_;                // by rank: it has reported trouble
  bool failed_ = false;                       // the failure has been reported to all
  std::string farewells_;  // sent again to ranks that connect after others have left
};

}  // namespace comm_core
