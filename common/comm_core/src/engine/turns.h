// Decides which thread of a process drives its operations, and which threads sleep and are woken.
//
// Waiting callers and the engine thread drive, one at a time: the thread that holds `driving_`.
//
//   sleeping thread           sleeps until                             woken by
//   the driver                any event, the next deadline             a thread that brings work; a
//                                                                      rank of this host that sees
//                                                                      the announced sleep
//   the engine thread         an event from a peer, `alarm_s_`         a thread that brings work
//                                                                      aloud, or leaves (see below)
//   a caller while another    the operation it waits for is done       the thread that completes it
//   thread drives
//
// A wake-up costs the waking thread microseconds in the kernel. `attended_` tells a thread that
// brings work that it needs none: a driver is awake, or a wake-up is pending. A driver clears it
// before it sleeps or leaves, and then looks for work once more.
//
// Invariants while no thread drives, is about to drive, or is being woken:
//   1. No queued work is left but quiet work. A thread that brings work quietly must wait for it or
//      announce it soon. If it waits, it drives, or wakes the thread that drives, if that sleeps.
//   2. No collective is in flight. A driver that leaves one behind wakes the engine thread.
//   3. The engine thread's alarm is not later than the earliest deadline. A driver that leaves an
//      earlier deadline behind, such as that of a message without a waiting caller, wakes it.
// A wake-up stays pending until a driver takes it, which must then leave by the same rules. The
// class is a template so that a test can run all orders of its threads: see tests/turns_test.cc.
#pragma once

#include "base/clock.h"

namespace comm_core {

// `World` is the engine (see Engine) or its model in the test. It owns the Turns.
template <typename World>
class Turns {
 public:
  using Until = typename World::Until;

  explicit Turns(World& world) : world_(world) {}

  // Announces work. Any thread calls it after it has queued the work that the driver will `take`.
  // `aloud` wakes a sleeping driver.
  void brought(bool aloud) {
    incoming_.store(true);
    if (aloud) alert();
  }

  // Announces work that was brought quietly, if a driver has not taken it yet.
  void announce() {
    if (incoming_.load()) alert();
  }

  // Drives or sleeps until `until` is done, or until the deadline, in seconds of the world's clock.
  void wait(Until& until, double deadline_s) {
    if (driving_.try_lock()) {
      drive(&until, deadline_s);
      leave();
    } else {
      alert();
    }
    world_.await(until, deadline_s);
  }

  // Takes the queued work once, for a caller after the engine thread has ended.
  void drive_once() {
    driving_.lock();
    take();
    driving_.unlock();
  }

  // The loop of the engine thread, until the world is stopped.
  void run() {
    while (!world_.stopped()) {
      driving_.lock();
      world_.look();
      drive(nullptr, kNever);
      attended_.store(false);
      const double alarm_s = alarm_s_ = world_.next_deadline_s();
      const bool more = incoming_.load();
      driving_.unlock();
      if (!more && !world_.stopped()) world_.nap(alarm_s);
    }
  }

  bool incoming() const { return incoming_.load(); }

 private:
  void alert() {
    if (!attended_.exchange(true)) world_.wake();
  }

  void leave() {
    attended_.store(false);
    const bool wakes =
        incoming_.load() || world_.under_way() || world_.next_deadline_s() < alarm_s_;
    driving_.unlock();
    if (wakes) alert();
  }

  void take() {
    if (!incoming_.load()) return;
    incoming_.store(false);  // before the take: work that is queued later sets it again
    world_.take();
  }

  void drive(Until* until, double deadline_s) {
    const auto over = [&] { return until != nullptr && until->done(); };
    attended_.store(true);
    for (;;) {
      take();
      const bool moved = world_.pass();
      if (over()) return;
      if (moved) {
        // Every few steps it polls other events too and checks the deadline.
        if (world_.moved() && world_.now_s() >= deadline_s) return;
        continue;
      }
      if (until == nullptr && (!world_.under_way() || world_.stopped())) return;
      if (world_.linger(until)) continue;

      // Announce the sleep, check once more, then sleep: a thread that acts after the check sees
      // the announcement.
      world_.announce_sleep(true);
      attended_.store(false);
      bool late = false;
      if (!incoming_.load() && !world_.pass()) {
        const double next_s = world_.next_deadline_s();
        late = world_.now_s() >= deadline_s;
        if (!late && !over()) world_.sleep(next_s < deadline_s ? next_s : deadline_s);
      }
      attended_.store(true);
      world_.announce_sleep(false);
      if (late || over()) return;
    }
  }

  World& world_;
  typename World::Mutex driving_;
  typename World::Flag incoming_{false};
  typename World::Flag attended_{false};
  double alarm_s_ = kNever;  // end of the engine thread's sleep; guarded by driving_
};

}  // namespace comm_core
