#include "fabric.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace link_switch {
namespace {

// Frames of a packet leave at even distances.
Nanoseconds frame_time(const Transit& transit, uint32_t frame) {
  const uint32_t gaps = transit.packet.segments() - 1;
  return gaps == 0 ? transit.last : transit.first + (transit.last - transit.first) * frame / gaps;
}

}  // namespace

Fabric::Fabric(uint32_t ports, uint64_t seed, Deliver deliver)
    : ports_(ports),
      deliver_(std::move(deliver)),
      random_(seed),
      lines_(2 * size_t{ports}),
      paths_(size_t{ports} * ports) {}

Line& Fabric::trunk(uint32_t number) {
  if (number >= kMaxTrunks) throw std::out_of_range("too many trunks");
  if (lines_.size() <= 2 * size_t{ports_} + number) lines_.resize(2 * size_t{ports_} + number + 1);
  return lines_[2 * size_t{ports_} + number].line;
}

void Fabric::arrive(Packet packet, uint32_t from, uint32_t to, Nanoseconds at) {
  push(events_, at, 0, Transit{std::move(packet), from, to, at, at});
}

void Fabric::advance(Nanoseconds now, Nanoseconds horizon) {
  while (!events_.empty() && events_.front().at <= horizon) {
    Event event = pop(events_);
    if (event.transit) {
      come(std::move(*event.transit), event.at);
    } else {
      lines_[event.line].awaited = false;
      run(event.line, event.at);
    }
  }
  for (;;) {
    // The older first, so that the packets of two hosts stay in order.
    const bool light = !light_.empty() && (due_.empty() || due_.front() < light_.front());
    Heap& heap = light ? light_ : due_;
    if (heap.empty() || heap.front().at > now) break;
    Transit transit = std::move(*pop(heap).transit);
    ++counts_.packets;
    counts_.frames += transit.packet.segments();
    counts_.bytes += transit.packet.wire_bytes();
    deliver_(std::move(transit));
  }
}

std::optional<Nanoseconds> Fabric::next_due(Nanoseconds lenience) const {
  const auto due = first(due_), light = first(light_);
  if (!light) return due;
  return std::min(due.value_or(INT64_MAX), *light + lenience);
}

std::optional<Nanoseconds> Fabric::first(const Heap& heap) {
  if (heap.empty()) return std::nullopt;
  return heap.front().at;
}

Fabric::Event Fabric::pop(Heap& heap) {
  std::pop_heap(heap.begin(), heap.end());
  Event event = std::move(heap.back());
  heap.pop_back();
  return event;
}

void Fabric::push(Heap& heap, Nanoseconds at, uint32_t line, std::optional<Transit> transit) {
  heap.push_back(Event{at, order_++, line, std::move(transit)});
  std::push_heap(heap.begin(), heap.end());
}

std::optional<uint32_t> Fabric::line_after(const Transit& transit) const {
  const auto& trunk = paths_[size_t{transit.from} * ports_ + transit.to].trunk;
  uint32_t hop = transit.hop;
  if (hop == 0) return transit.from;
  if (trunk && hop == 1) return 2 * ports_ + *trunk;
  if (trunk) --hop;
  if (hop == 1) return ports_ + transit.to;
  return std::nullopt;
}

void Fabric::come(Transit transit, Nanoseconds at) {
  const uint32_t number = *line_after(transit);
  counts_.overflows += lines_[number].line.enqueue(std::move(transit));
  run(number, at);
}

void Fabric::run(uint32_t number, Nanoseconds now) {
  auto& [line, awaited] = lines_[number];
  while (auto transit = line.start(now)) {
    if (transit->hop++ == 0) {
      leave_up_line(std::move(*transit));
    } else if (line_after(*transit)) {
      push(events_, transit->first, 0, std::move(transit));  // from its first frame on
    } else {
      Heap& heap = transit->packet.is_acknowledgement() ? light_ : due_;
      push(heap, transit->last, 0, std::move(transit));
    }
  }
  if (line.waiting() && !awaited) {
    awaited = true;
    push(events_, line.free_at(), number, std::nullopt);
  }
}

void Fabric::leave_up_line(Transit transit) {
  Path& path = this->path(transit.from, transit.to);
  Nanoseconds delay = path.delay;
  if (path.jitter > 0) {
    delay += std::uniform_int_distribution<Nanoseconds>(-path.jitter, path.jitter)(random_);
  }
  // What was sent first comes first: else TCP would take every jitter for a loss.
  delay = std::max(delay, path.latest - transit.first);
  path.latest = transit.last + delay;
  std::vector<std::pair<uint32_t, uint32_t>> kept;  // frames from .first to before .second
  const uint32_t segments = transit.packet.segments();
  if (path.loss > 0) {
    std::bernoulli_distribution is_lost(path.loss);
    uint32_t begin = 0;
    for (uint32_t frame = 0; frame < segments; ++frame) {
      if (!is_lost(random_)) continue;
      ++counts_.lost;
      if (begin < frame) kept.emplace_back(begin, frame);
      begin = frame + 1;
    }
    if (begin < segments) kept.emplace_back(begin, segments);
  } else {
    kept.emplace_back(0, segments);
  }
  for (const auto& [begin, end] : kept) {
    const bool whole = end - begin == segments;
    Transit part{whole ? std::move(transit.packet) : transit.packet.cut(begin, end),
                 transit.from,
                 transit.to,
                 whole ? transit.first : frame_time(transit, begin),
                 whole ? transit.last : frame_time(transit, end - 1),
                 transit.hop};
    part.first += delay;
    part.last += delay;
    const Nanoseconds at = part.first;
    push(events_, at, 0, std::move(part));
  }
}

}  // namespace link_switch
