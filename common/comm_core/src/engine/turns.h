// Who drives the operations of a process, who sleeps until when, and who wakes whom.
//
// Callers who wait and the engine's own thread drive, one at a time: the one who holds `driving_`.
//
//   who sleeps                on what                                  who wakes him
//   the driver                every event, the next deadline           who brings work; a rank of
//                                                                      this host that sees him
//                                                                      announce his sleep
//   the own thread            what peers begin, its `alarm_s_`         who brings work aloud; who
//                                                                      leaves as below
//   a caller while another    the end of what he waits for             whoever ends it
//   drives
//
// What holds whenever nobody drives, but for one who is about to, or a wake-up under way:
//   1. Nothing that was brought is left lying. Who brings it quietly waits at once, and so drives,
//      or finds a driver, who may have looked for the last time: then he wakes.
//   2. No collective is under way: who leaves one behind wakes the own thread.
//   3. The own thread's alarm is at the earliest deadline or before: who leaves a deadline behind
//      that comes sooner, as of a message that nobody waits for, wakes it.
// A wake-up stays until a driver takes it, who then has to leave by these rules himself. A
// template, so that a test can go through the orders in which threads meet here: see
// tests/turns_test.cc.
#pragma once

#include "base/clock.h"

namespace comm_core {

template <typename World>
class Turns {
 public:
  using Until = typename World::Until;

  explicit Turns(World& world) : world_(world) {}

  // From any thread, after it has put down what the driver will `take`.
  void brought(bool aloud) {
    incoming_.store(true);
    if (aloud) world_.wake();
  }

  // Returns when `until` is done, or at the deadline.
  void wait(Until& until, double deadline_s) {
    if (driving_.try_lock()) {
      drive(&until, deadline_s);
      leave();
    } else {
      world_.wake();
    }
    world_.await(until, deadline_s);
  }

  // Takes what has been brought, where the own thread has ended.
  void drive_once() {
    driving_.lock();
    take();
    driving_.unlock();
  }

  // The own thread's life.
  void run() {
    while (!world_.stopped()) {
      driving_.lock();
      world_.look();
      drive(nullptr, kNever);
      const double alarm_s = alarm_s_ = world_.next_deadline_s();
      driving_.unlock();
      if (!world_.stopped()) world_.nap(alarm_s);
    }
  }

  bool incoming() const { return incoming_.load(); }

 private:
  void leave() {
    const bool wakes =
        incoming_.load() || world_.under_way() || world_.next_deadline_s() < alarm_s_;
    driving_.unlock();
    if (wakes) world_.wake();
  }

  void take() {
    if (!incoming_.load()) return;
    incoming_.store(false);  // first: what is put down from here on says so again
    world_.take();
  }

  void drive(Until* until, double deadline_s) {
    const auto over = [&] { return until != nullptr && until->done(); };
    for (;;) {
      take();
      const bool moved = world_.pass();
      if (over()) return;
      if (moved) {
        // Now and then it looks around.
        if (world_.moved() && world_.now_s() >= deadline_s) return;
        continue;
      }
      if (until == nullptr && (!world_.under_way() || world_.stopped())) return;
      if (world_.linger(until)) continue;

      // Announce the sleep, look once more, sleep: who acts after the look sees the announcement.
      world_.announce_sleep(true);
      bool late = false;
      if (!world_.pass()) {
        const double next_s = world_.next_deadline_s();
        late = world_.now_s() >= deadline_s;
        if (!late && !over()) world_.sleep(next_s < deadline_s ? next_s : deadline_s);
      }
      world_.announce_sleep(false);
      if (late || over()) return;
    }
  }

  World& world_;
  typename World::Mutex driving_;
  typename World::Flag incoming_{false};
  double alarm_s_ = kNever;  // the own thread sleeps at most until then; only while driving
};

}  // namespace comm_core
