// Explores all interleavings of threads in Turns with a limited number of unforced switches, and
// checks that no operation is left waiting after it could end or after its deadline.
//
// The threads are fibers, of which one runs at a time. Before each step that other threads can see,
// the scheduler may switch to another fiber. It tries all choices depth first, each in a new world.
// Time advances only when no fiber can run, up to the next alarm. If that is later than the
// deadline of an operation, a wake-up was lost.
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "engine/turns.h"

using namespace comm_core;

namespace {

class Fibers {
 public:
  // Runs all schedules of the fibers that `make` starts, with at most `changes` unforced switches.
  // Returns the number of schedules.
  static size_t explore(int changes, const std::function<void(Fibers&)>& make) {
    std::vector<size_t> path;
    size_t schedules = 0;
    do {
      Fibers fibers(path, changes);
      make(fibers);
      fibers.run();
      ++schedules;
    } while (next(path));
    return schedules;
  }

  Fibers(std::vector<size_t>& path, int changes) : path_(path), changes_left_(changes) {
    widths().resize(path.size());
  }

  void start(std::function<void()> body) {
    auto fiber = std::make_unique<Fiber>();
    fiber->body = std::move(body);
    static std::vector<std::vector<char>> stacks;  // reused by each new world
    if (stacks.size() == all_.size()) stacks.emplace_back(64 << 10);
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stacks[all_.size()].data();
    fiber->context.uc_stack.ss_size = stacks[all_.size()].size();
    fiber->context.uc_link = &main_;
    all_.push_back(std::move(fiber));
  }

  // Lets other fibers run first.
  void yield() {
    switch_out([] { return true; }, kNever);
  }
  // Blocks the fiber until `ready()` or the time `until_s`.
  void block(std::function<bool()> ready, double until_s = kNever) {
    switch_out(std::move(ready), until_s);
  }
  double now_s() const { return now_s_; }
  // A check that runs before time advances to `until_s`.
  std::function<void(double until_s)> before_time_passes = [](double) {};
  // True if the scenario has reached its goal.
  std::function<bool()> complete = [] { return true; };

 private:
  struct Fiber {
    ucontext_t context;
    std::function<void()> body;
    std::function<bool()> ready = [] { return true; };
    double until_s = kNever;
    bool begun = false, over = false;
  };

  // The number of choices at each step of the path.
  static std::vector<size_t>& widths() {
    static std::vector<size_t> all;
    return all;
  }

  static bool next(std::vector<size_t>& path) {
    while (!path.empty()) {
      if (++path.back() < widths()[path.size() - 1]) return true;
      path.pop_back();
    }
    return false;
  }

  static void trampoline(unsigned low, unsigned high) {
    auto* fiber = reinterpret_cast<Fiber*>(uintptr_t(low) | uintptr_t(high) << 32);
    fiber->body();
    fiber->over = true;
  }

  bool can_run(const Fiber& fiber) const {
    return !fiber.over && (fiber.until_s <= now_s_ || fiber.ready());
  }

  void switch_out(std::function<bool()> ready, double until_s) {
    Fiber& fiber = *all_[running_];
    fiber.ready = std::move(ready);
    fiber.until_s = until_s;
    swapcontext(&fiber.context, &main_);
  }

  size_t choose(size_t width) {
    if (width == 1) return 0;
    if (step_ == path_.size()) {
      path_.push_back(0);
      widths().push_back(width);
    }
    widths()[step_] = width;
    return path_[step_++];
  }

  void run() {
    for (size_t steps = 0;; ++steps) {
      testing::expect(steps < 10000, "the schedule does not end");
      std::vector<size_t> able;
      for (size_t i = 0; i < all_.size(); ++i) {
        if (can_run(*all_[i])) able.push_back(i);
      }
      if (able.empty()) {
        double next_s = kNever;
        for (const auto& fiber : all_) {
          if (!fiber->over) next_s = std::min(next_s, fiber->until_s);
        }
        before_time_passes(next_s);
        if (next_s == kNever) break;
        now_s_ = next_s;
        continue;
      }
      // The fiber that ran last comes first: continuing it costs no switch.
      const auto same = std::find(able.begin(), able.end(), running_);
      const bool forced = same == able.end();
      if (!forced) std::rotate(able.begin(), same, same + 1);
      const size_t chosen = forced || changes_left_ > 0 ? choose(able.size()) : 0;
      if (!forced && chosen > 0) --changes_left_;
      running_ = able[chosen];
      Fiber& fiber = *all_[running_];
      if (!fiber.begun) {
        fiber.begun = true;
        const auto at = uintptr_t(&fiber);
        makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Fibers::trampoline), 2,
                    unsigned(at), unsigned(at >> 32));
      }
      swapcontext(&main_, &fiber.context);
    }
    testing::expect(complete(), "an operation has not ended");
  }

  std::vector<size_t>& path_;
  size_t step_ = 0;
  int changes_left_;
  ucontext_t main_;
  std::vector<std::unique_ptr<Fiber>> all_;
  size_t running_ = SIZE_MAX;
  double now_s_ = 0;
};

Fibers* fibers;  // those of the current world

class FlagOfFibers {
 public:
  FlagOfFibers(bool set) : set_(set) {}
  bool load() const {
    fibers->yield();
    return set_;
  }
  void store(bool set) {
    fibers->yield();
    set_ = set;
  }
  bool exchange(bool set) {
    fibers->yield();
    return std::exchange(set_, set);
  }

 private:
  bool set_;
};

class MutexOfFibers {
 public:
  bool try_lock() {
    fibers->yield();
    return !std::exchange(locked_, true);
  }
  void lock() {
    fibers->block([this] { return !locked_; });
    locked_ = true;
  }
  void unlock() {
    fibers->yield();
    locked_ = false;
  }

 private:
  bool locked_ = false;
};

// An operation ends when its peer's answer has arrived, or at its deadline. A collective advances
// only while a thread drives; a message ends when a thread notices its answer.
struct Operation {
  bool collective = false;
  double deadline_s = kNever;
  bool answered = false;  // the peer's answer has arrived
  bool ended = false;
  bool done() const { return ended; }
};

class World {
 public:
  using Until = Operation;
  using Mutex = MutexOfFibers;
  using Flag = FlagOfFibers;

  explicit World(Fibers& here) {
    fibers = &here;
    here.before_time_passes = [this](double next_s) {
      for (const auto& op : all_) {
        const bool due = op->ended || (!op->answered && next_s <= op->deadline_s);
        testing::expect(due, "a wake-up was lost");
      }
    };
    here.complete = [this] {
      return std::all_of(all_.begin(), all_.end(), [](const auto& op) { return op->ended; });
    };
    here.start([this] { turns.run(); });
  }

  Operation& make(bool collective, double deadline_s) {
    all_.push_back(std::make_unique<Operation>());
    *all_.back() = {collective, deadline_s, false, false};
    return *all_.back();
  }
  void bring(Operation& op, bool aloud) {
    fibers->yield();
    brought_.push_back(&op);
    turns.brought(aloud);
  }
  void wait(Operation& op) {
    while (!op.done()) turns.wait(op, kNever);
  }
  // A peer's answer. For a message it comes through the kernel. For a collective it comes through
  // shared memory, and the peer wakes this process only if its driver sleeps.
  void answer(Operation& op) {
    fibers->yield();
    op.answered = true;
    if (!op.collective) {
      news_of_messages_ = true;
      return;
    }
    fibers->yield();
    if (std::exchange(asleep_, false)) news_of_collectives_ = true;
  }

  // The interface that Turns requires of an engine.
  void take() {
    fibers->yield();
    for (Operation* op : std::exchange(brought_, {})) under_way_.push_back(op);
    hear();
  }
  bool pass() {
    fibers->yield();
    for (Operation* op : under_way_) {
      if (!op->collective) continue;
      if (!op->answered) return false;  // collectives end in order
      end(op);
      return true;
    }
    return false;
  }
  bool moved() { return false; }
  bool under_way() const {
    return std::any_of(under_way_.begin(), under_way_.end(),
                       [](const Operation* op) { return op->collective; });
  }
  double next_deadline_s() {
    double next_s = kNever;
    for (Operation* op : std::vector<Operation*>(under_way_)) {
      if (op->deadline_s <= fibers->now_s()) {
        end(op);
      } else {
        next_s = std::min(next_s, op->deadline_s);
      }
    }
    return next_s;
  }
  bool linger(const Operation*) { return false; }
  void announce_sleep(bool asleep) {
    fibers->yield();
    asleep_ = asleep;
  }
  void sleep(double until_s) {
    fibers->block([this] { return woken_ || news_of_collectives_ || news_of_messages_; }, until_s);
    news_of_collectives_ = false;
    look();
  }
  void look() {
    fibers->yield();
    woken_ = false;
    hear();
  }
  // Waits without handling events.
  void nap(double until_s) {
    fibers->block([this] { return woken_ || news_of_messages_; }, until_s);
  }
  void await(Operation& op, double until_s) {
    fibers->block([&op] { return op.done(); }, until_s);
  }
  void wake() {
    fibers->yield();
    woken_ = true;
  }
  bool stopped() const { return false; }
  double now_s() const { return fibers->now_s(); }

  Turns<World> turns{*this};

 private:
  void end(Operation* op) {
    op->ended = true;
    std::erase(under_way_, op);
  }
  // Ends the messages whose answer has arrived.
  void hear() {
    news_of_messages_ = false;
    for (Operation* op : std::vector<Operation*>(under_way_)) {
      if (!op->collective && op->answered) end(op);
    }
  }

  std::vector<std::unique_ptr<Operation>> all_;
  std::vector<Operation*> brought_, under_way_;
  bool woken_ = false, asleep_ = false;
  bool news_of_collectives_ = false, news_of_messages_ = false;  // pending events in the kernel
};

void go_through(const char* what, int changes,
                const std::function<void(World&, Fibers&)>& scenario) {
  const size_t schedules = Fibers::explore(changes, [&](Fibers& here) {
    // The bodies of the fibers hold the world, so it lives as long as they do.
    auto world = std::make_shared<World>(here);
    here.start([world] {});
    scenario(*world, here);
  });
  printf("  %s: %zu schedules\n", what, schedules);
}

// A message without an answer ends at its deadline, while a caller drives and leaves.
void a_message_that_nobody_waits_for() {
  go_through("a message and a collective", 2, [](World& world, Fibers& here) {
    Operation& message = world.make(false, 1.5);
    Operation& collective = world.make(true, kNever);
    here.start([&] {
      world.bring(message, true);
      world.bring(collective, false);
      world.wait(collective);
    });
    here.start([&] { world.answer(collective); });
  });
}

void two_callers() {
  go_through("two callers", 1, [](World& world, Fibers& here) {
    Operation& first = world.make(true, kNever);
    Operation& second = world.make(true, kNever);
    for (Operation* op : {&first, &second}) {
      here.start([&world, op] {
        world.bring(*op, false);
        world.wait(*op);
      });
    }
    here.start([&] {
      world.answer(first);
      world.answer(second);
    });
  });
}

void a_caller_and_messages_of_another() {
  go_through("a caller and another's messages", 1, [](World& world, Fibers& here) {
    Operation& collective = world.make(true, 9);
    Operation& late = world.make(false, 4);
    Operation& soon = world.make(false, 2);
    here.start([&] {
      world.bring(collective, false);
      world.wait(collective);
    });
    here.start([&] {
      world.bring(late, true);
      world.bring(soon, true);
    });
    here.start([&] {
      world.answer(late);
      world.answer(collective);
    });
  });
}

void a_caller_whose_message_comes() {
  go_through("a caller's message and another's", 1, [](World& world, Fibers& here) {
    Operation& his = world.make(false, 9);
    Operation& other = world.make(false, 4);
    here.start([&] {
      world.bring(his, false);
      world.wait(his);
    });
    here.start([&] { world.bring(other, true); });
    here.start([&] { world.answer(his); });
  });
}

// Without a waiting caller, the engine thread must take all work.
void two_that_nobody_waits_for() {
  go_through("two that nobody waits for", 2, [](World& world, Fibers& here) {
    Operation& first = world.make(true, kNever);
    Operation& second = world.make(true, kNever);
    here.start([&] {
      world.bring(first, true);
      world.bring(second, false);
      world.turns.announce();
    });
    here.start([&] {
      world.answer(first);
      world.answer(second);
    });
  });
}

void a_peer_that_never_answers() {
  go_through("nobody answers", 2, [](World& world, Fibers& here) {
    Operation& collective = world.make(true, 2);
    Operation& message = world.make(false, 1);
    here.start([&] {
      world.bring(collective, false);
      world.wait(collective);
    });
    here.start([&] { world.bring(message, true); });
  });
}

}  // namespace

int main(int argc, char** argv) {
  return testing::run_tests(argc, argv,
                            {{"a message that nobody waits for", a_message_that_nobody_waits_for},
                             {"two callers", two_callers},
                             {"a caller and another's messages", a_caller_and_messages_of_another},
                             {"a caller whose message comes", a_caller_whose_message_comes},
                             {"two that nobody waits for", two_that_nobody_waits_for},
                             {"a peer that never answers", a_peer_that_never_answers}});
}
