#include "line.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace link_switch {

void Line::set(double bits_per_s, uint64_t queue_bytes) {
  ns_per_byte_ = bits_per_s > 0 ? 8e9 / bits_per_s : 0;
  queue_limit_ = queue_bytes;
}

uint32_t Line::enqueue(Transit transit) {
  const Packet& packet = transit.packet;
  const uint32_t segments = packet.segments();
  // What finds the line free does not wait.
  const bool waits = !queue_.empty() || transit.first < free_at_;
  const uint64_t room = queue_limit_ > queued_bytes_ ? queue_limit_ - queued_bytes_ : 0;
  uint32_t kept = segments;
  if (waits && packet.wire_bytes() > room) {
    kept = segments == 1 ? 0 : static_cast<uint32_t>(room / packet.frame_bytes());
  }
  if (kept == 0) return segments;
  if (kept < segments) transit.packet = packet.cut(0, kept);
  queued_bytes_ += transit.packet.wire_bytes();
  queue_.push_back(std::move(transit));
  return segments - kept;
}

std::optional<Transit> Line::start(Nanoseconds now) {
  if (queue_.empty() || now < free_at_) return std::nullopt;
  Transit transit = std::move(queue_.front());
  queue_.pop_front();
  queued_bytes_ -= transit.packet.wire_bytes();
  // From when it could be sent, not from when somebody came to look.
  const Nanoseconds begin = std::max(transit.first, free_at_);
  const Nanoseconds frame = duration(transit.packet.frame_bytes());
  const Nanoseconds sent = begin + duration(transit.packet.wire_bytes());
  transit.first = begin + frame;
  transit.last = std::max(sent, transit.last + frame);
  free_at_ = transit.last;
  return transit;
}

Nanoseconds Line::duration(uint64_t bytes) const {
  return std::llround(static_cast<double>(bytes) * ns_per_byte_);
}

}  // namespace link_switch
