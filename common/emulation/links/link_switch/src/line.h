// A line that sends one frame after the other: its rate, and the queue before it.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <optional>

#include "packet.h"

namespace link_switch {

using Nanoseconds = int64_t;  // of CLOCK_MONOTONIC

// A packet on its way, and when the first and the last of its frames come to where it is now. The
// two are apart as on a wire: of a super-packet that is still being sent on one line the next line
// has the first frames already.
struct Transit {
  Packet packet;
  uint32_t from;
  uint32_t to;
  Nanoseconds first;
  Nanoseconds last;
  uint32_t hop = 0;  // how many lines it has left behind
};

class Line {
 public:
  static constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();

  // 0 bits per second: infinitely fast. `queue_bytes` may wait, counted as on the wire. What is
  // being sent goes on at its rate.
  void set(double bits_per_s, uint64_t queue_bytes);

  // Takes what there is room for: the first frames of a super-packet, where not all fit. Returns
  // how many it has dropped. What is due by `now` must have been started.
  uint32_t enqueue(Transit transit);

  // The next packet, if the line is free at `now`: with the times at which its frames have left.
  std::optional<Transit> start(Nanoseconds now);
  // When the line is free again; it has nothing to do with whether something waits.
  Nanoseconds free_at() const { return free_at_; }
  bool waiting() const { return !queue_.empty(); }
  uint64_t queued_bytes() const { return queued_bytes_; }

 private:
  Nanoseconds duration(uint64_t bytes) const;

  double ns_per_byte_ = 0;
  uint64_t queue_limit_ = kNoLimit;
  uint64_t queued_bytes_ = 0;
  Nanoseconds free_at_ = 0;
  std::deque<Transit> queue_;
};

}  // namespace link_switch
