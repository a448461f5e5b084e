// The switch and the lines of its hosts, as a simulation that is driven by packets and a clock: it
// reads neither, so that a test can be both.
//
// A packet from host A to host B passes A's up line, where frames may then be lost; takes the delay
// of the pair; passes the trunk between the sites of the two, if there is one; and passes B's down
// line. It is delivered when its last frame has come.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <random>
#include <vector>

#include "line.h"

namespace link_switch {

struct Path {
  Nanoseconds delay = 0;
  Nanoseconds jitter = 0;         // the delay varies evenly by up to this; the order stays
  double loss = 0;                // of each frame, by itself
  std::optional<uint32_t> trunk;  // number of the line between two sites
  Nanoseconds latest = 0;         // when its last frame came to its end
};

struct Counts {
  uint64_t packets = 0;    // delivered, as the kernel made them
  uint64_t frames = 0;     // delivered
  uint64_t bytes = 0;      // of those
  uint64_t lost = 0;       // frames, by the loss of a path
  uint64_t overflows = 0;  // frames for which a queue had no room
};

class Fabric {
 public:
  // Called with `last` as the time at which the packet is due at the port `to`.
  using Deliver = std::function<void(Transit)>;

  Fabric(uint32_t ports, uint64_t seed, Deliver deliver);

  uint32_t ports() const { return ports_; }
  static constexpr uint32_t kMaxTrunks = 1024;
  Line& up(uint32_t port) { return lines_.at(port).line; }
  Line& down(uint32_t port) { return lines_.at(ports_ + port).line; }
  Line& trunk(uint32_t number);  // made when it is asked for first
  Path& path(uint32_t from, uint32_t to) { return paths_.at(size_t{from} * ports_ + to); }

  // The kernel has sent this packet at that time.
  void arrive(Packet packet, uint32_t from, uint32_t to, Nanoseconds at);
  // Delivers what is due by `now`, in the order of time. What happens before that on the lines is
  // worked out up to `horizon`, which is not before `now`: so far ahead as nothing that arrives
  // from now on can be in its way.
  void advance(Nanoseconds now, Nanoseconds horizon);
  // When the next packet known so far must be delivered, and when the next thing happens on a line;
  // nullopt: none before a packet arrives. Acknowledgements may be late by `lenience`: mostly
  // something else is due by then, and nobody need be woken for them.
  std::optional<Nanoseconds> next_due(Nanoseconds lenience) const;
  std::optional<Nanoseconds> next_event() const { return first(events_); }

  const Counts& counts() const { return counts_; }

 private:
  struct Numbered {
    Line line;
    bool awaited = false;  // there is an event for when it is free
  };
  struct Event {
    Nanoseconds at;
    uint64_t order;  // of two at the same time the older comes first
    uint32_t line;   // that is free, where there is no packet
    std::optional<Transit> transit;
    bool operator<(const Event& other) const {
      return at != other.at ? at > other.at : order > other.order;
    }
  };

  using Heap = std::vector<Event>;
  static std::optional<Nanoseconds> first(const Heap& heap);
  static Event pop(Heap& heap);
  void push(Heap& heap, Nanoseconds at, uint32_t line, std::optional<Transit> transit);
  std::optional<uint32_t> line_after(const Transit& transit) const;
  void come(Transit transit, Nanoseconds at);
  void run(uint32_t number, Nanoseconds now);
  void leave_up_line(Transit transit);

  uint32_t ports_;
  Deliver deliver_;
  std::mt19937_64 random_;
  std::deque<Numbered> lines_;  // grows without moving them
  std::vector<Path> paths_;
  Heap events_;  // on lines
  Heap due_;     // deliveries
  Heap light_;   // deliveries of acknowledgements
  uint64_t order_ = 0;
  Counts counts_;
};

}  // namespace link_switch
