// How the engine advances operations, and how it waits when none can move.
#include <sched.h>

#include <algorithm>

#include "clock.h"
#include "engine.h"
#include "group.h"

namespace comm_core {

namespace {

// Between looks at connections and messages while data keeps moving.
constexpr int kStepsBetweenPolls = 64;
// A few microseconds: longer than a neighbour's memory copy, shorter than a context switch.
constexpr int kSpins = 200;
// A waiting caller gives way so long before it sleeps, for operations of so few bytes: to halt an
// idle virtual processor and to wake it again costs more than they take.
constexpr double kGiveWayS = 50e-6;
constexpr uint64_t kGiveWayBytes = 64 << 10;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

void Engine::drive(const Op* until, double deadline_s) {
  const bool gives_way =
      until != nullptr && until->group_->total_bytes(until->spec_) <= kGiveWayBytes;
  int steps = 0;
  for (;;) {
    take_incoming();
    const bool moved = pass();
    if (until != nullptr && until->done()) return;
    if (moved) {
      if (++steps % kStepsBetweenPolls == 0) {
        poller_.wait(Watch::always, 0);
        check_deadlines();
      }
      continue;
    }
    if (has_incoming_.load()) continue;
    if (until == nullptr && !has_work()) return;
    if (stop_ && until == nullptr) return;
    if (spin_allowed_ && spin()) continue;
    if (gives_way && give_way(*until)) continue;

    // Announce the sleep, look once more, sleep: whoever acts after the look sees the announcement.
    blocked_.store(true, std::memory_order_seq_cst);
    for (Group* group : groups_) group->announce_sleep(true);
    if (!has_incoming_.load(std::memory_order_seq_cst) && !pass()) {
      const double now = now_s();
      if (now >= deadline_s) {
        blocked_.store(false);
        for (Group* group : groups_) group->announce_sleep(false);
        return;
      }
      const double next = check_deadlines();
      double timeout = next < 0 ? -1 : std::max(0.0, next - now);
      if (deadline_s < 1e300)
        timeout = timeout < 0 ? deadline_s - now : std::min(timeout, deadline_s - now);
      if (!(until != nullptr && until->done())) poller_.wait(Watch::when_active, timeout);
    }
    blocked_.store(false);
    for (Group* group : groups_) group->announce_sleep(false);
    if (until != nullptr && until->done()) return;
  }
}

bool Engine::spin() {
  bool worth_it = false;
  for (Group* group : groups_) worth_it = worth_it || group->spins();
  if (!worth_it) return false;
  for (int i = 0; i < kSpins; ++i) {
    pause();
    if (i % 4 == 3 && pass()) return true;
  }
  return false;
}

// Whoever wants the processor gets it, and nobody is kept from it longer than a pass takes.
bool Engine::give_way(const Op& until) {
  const bool message = point_to_point(until.spec_.kind);
  const double end = now_s() + kGiveWayS;
  do {
    sched_yield();
    if (message) poller_.wait(Watch::always, 0);
    if (has_incoming_.load() || pass() || until.done()) return true;
  } while (now_s() < end);
  return false;
}

void Engine::take_incoming() {
  if (!has_incoming_.load()) return;
  std::vector<std::function<void()>> taken;
  {
    std::lock_guard<std::mutex> lock(incoming_mutex_);
    taken.swap(incoming_);
    has_incoming_.store(false);
  }
  for (auto& work : taken) {
    work();
    // What it holds goes before the next runs: after a group's end, the caller may drop the engine,
    // whose own thread must not be left with the last hold on it.
    work = nullptr;
  }
}

bool Engine::has_work() {
  if (has_incoming_.load()) return true;
  return std::any_of(groups_.begin(), groups_.end(), [](Group* g) { return g->head() != nullptr; });
}

bool Engine::pass() {
  // The most urgent first, then the oldest. There are few groups: no need for a sorted structure.
  Group* tried[64];
  int num_tried = 0;
  for (;;) {
    Group* best = nullptr;
    const Op* best_op = nullptr;
    for (Group* group : groups_) {
      const Op* op = group->head();
      if (op == nullptr || std::find(tried, tried + num_tried, group) != tried + num_tried)
        continue;
      if (best == nullptr || op->spec().priority > best_op->spec().priority ||
          (op->spec().priority == best_op->spec().priority &&
           op->times().enqueued_s < best_op->times().enqueued_s)) {
        best = group;
        best_op = op;
      }
    }
    if (best == nullptr) return false;
    if (best->step()) return true;
    if (num_tried == 64) return false;
    tried[num_tried++] = best;
  }
}

double Engine::check_deadlines() {
  const double now = now_s();
  double next = listener_ != nullptr ? listener_->expire(now) : -1;
  for (Group* group : std::vector<Group*>(groups_)) {
    const double deadline = group->check_deadlines(now);
    if (deadline >= 0 && (next < 0 || deadline < next)) next = deadline;
  }
  return next;
}

}  // namespace comm_core
