#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>
#include <algorithm>
#include <limits>

#include "base/clock.h"
#include "group/group.h"

namespace comm_core {
namespace {

constexpr size_t kMaxEvents = 4096;

}  // namespace

Engine::Engine(const Options& options)
    : options_(options),
      spin_allowed_(std::thread::hardware_concurrency() > 1),
      thread_([this] { run(); }) {
  pthread_setname_np(thread_.native_handle(), "comm_core");
}

Engine::~Engine() { stop(); }

void Engine::stop() {
  stop_ = true;
  poller_.wake();
  if (thread_.joinable()) thread_.join();
}

Listener& Engine::listener(const std::string& host) {
  if (listener_ == nullptr) {
    listener_ = std::make_unique<Listener>(poller_, Address::parse(host, 0), options_.sockets);
  } else if (listener_->address().host() != host) {
    throw InvalidRequestError("this process already listens on " + listener_->address().text() +
                              "; a group on " + host + " needs a process of its own");
  }
  return *listener_;
}

void Engine::stop_listening(const Bytes16& group) {
  if (listener_ != nullptr) listener_->remove_group(group);
}

uint64_t Engine::dropped_connections() const {
  return listener_ != nullptr ? listener_->dropped() : 0;
}

void Engine::add_group(Group* group) { groups_.push_back(group); }

void Engine::remove_group(Group* group) { std::erase(groups_, group); }

void Engine::post(std::function<void()> work, bool wake) {
  {
    std::lock_guard<std::mutex> lock(incoming_mutex_);
    incoming_.push_back(std::move(work));
    has_incoming_.store(true, std::memory_order_seq_cst);
  }
  if (wake || blocked_.load(std::memory_order_seq_cst)) poller_.wake();
}

void Engine::submit(OpPtr op) {
  const bool wake = op->spec_.wake;
  bury();
  {
    std::lock_guard<std::mutex> lock(finished_mutex_);
    if (under_way_++ == 0) lull_ = {last_finished_s_, op->times_.enqueued_s};
  }
  post([op = std::move(op)] { op->group_->enqueue(op); }, wake);
}

void Engine::call(const std::function<void()>& work) {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;
  post(
      [&] {
        try {
          work();
        } catch (...) {
          error = std::current_exception();
        }
        std::lock_guard<std::mutex> lock(mutex);
        done = true;
        changed.notify_one();
      },
      true);
  std::unique_lock<std::mutex> lock(mutex);
  while (!changed.wait_for(lock, std::chrono::milliseconds(50), [&] { return done; })) {
    if (!stop_) continue;
    // The engine has ended: the caller does the work himself.
    lock.unlock();
    {
      std::lock_guard<std::mutex> driving(driving_);
      take_incoming();
    }
    lock.lock();
  }
  if (error) std::rethrow_exception(error);
}

bool Engine::wait(Op& op, double timeout_s) {
  const double deadline =
      timeout_s > 0 ? now_s() + timeout_s : std::numeric_limits<double>::infinity();
  if (!op.done()) {
    std::unique_lock<std::mutex> driving(driving_, std::try_to_lock);
    if (driving.owns_lock()) {
      drive(&op, deadline);
      const bool more = has_work();
      driving.unlock();
      if (more) poller_.wake();
    } else {
      // The driver may be leaving and not have seen an operation that was submitted quietly.
      poller_.wake();
    }
  }
  bool done = true;
  if (!op.done()) {
    std::unique_lock<std::mutex> lock(op.mutex_);
    const auto is_done = [&] { return op.done(); };
    if (timeout_s > 0) {
      const double left = std::max(0.0, deadline - now_s());
      done = op.changed_.wait_for(lock, std::chrono::duration<double>(left), is_done);
    } else {
      op.changed_.wait(lock, is_done);
    }
  }
  if (done) bury();
  return done;
}

void Engine::bury() {
  std::vector<std::shared_ptr<void>> dead;
  std::lock_guard<std::mutex> lock(finished_mutex_);
  dead.swap(graveyard_);
  // `dead` is destroyed after the lock: a tensor's end may need Python's lock.
}

std::vector<Event> Engine::events() {
  std::lock_guard<std::mutex> lock(finished_mutex_);
  std::vector<Event> ordered(events_.begin() + long(next_event_), events_.end());
  ordered.insert(ordered.end(), events_.begin(), events_.begin() + long(next_event_));
  return ordered;
}

Lull Engine::last_lull() {
  std::lock_guard<std::mutex> lock(finished_mutex_);
  return lull_;
}

void Engine::complete(const OpPtr& op, std::exception_ptr error) {
  if (op->spec_.epilogue && !error) {
    try {
      op->spec_.epilogue();
    } catch (...) {
      error = std::current_exception();
    }
  }
  op->times_.finished_s = now_s();
  if (op->times_.started_s == 0) op->times_.started_s = op->times_.finished_s;
  last_finished_s_ = op->times_.finished_s;
  {
    std::lock_guard<std::mutex> lock(finished_mutex_);
    --under_way_;
    const Event event{op->spec_.kind,       op->spec_.dtype, op->spec_.priority,
                      op->group_->number(), op->sequence_,   op->group_->total_bytes(op->spec_),
                      op->times_,           !error};
    if (events_.size() < kMaxEvents) {
      events_.push_back(event);
    } else {
      events_[next_event_] = event;
      next_event_ = (next_event_ + 1) % kMaxEvents;
    }
    // Tensors end in a caller's thread: their end may need Python's lock.
    graveyard_.push_back(std::move(op->spec_.keep_alive));
    graveyard_.push_back(
        std::make_shared<std::function<void()>>(std::exchange(op->spec_.epilogue, nullptr)));
  }
  auto callbacks = op->finish(error);
  if (callbacks.empty()) return;
  std::lock_guard<std::mutex> lock(finished_mutex_);
  graveyard_.push_back(std::make_shared<std::vector<std::function<void()>>>(std::move(callbacks)));
}

void Engine::run() {
  while (!stop_) {
    double next = -1;
    {
      std::lock_guard<std::mutex> driving(driving_);
      poller_.wait(Watch::always, 0);
      drive(nullptr, std::numeric_limits<double>::infinity());
      next = check_deadlines();
    }
    if (stop_) break;
    // Only waits: a caller may be driving meanwhile, and answers what this would have answered.
    poller_.wait_only(Watch::always, next < 0 ? -1 : std::max(0.0, next - now_s()));
  }
}

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
