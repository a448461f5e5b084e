#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>
#include <algorithm>
#include <iterator>
#include <limits>

#include "base/clock.h"
#include "tcp/device.h"

namespace comm_core {
namespace {

constexpr size_t kMaxEvents = 4096;
constexpr size_t kLulls = 64;

}  // namespace

Engine::Engine(const Options& options)
    : options_(options),
      spin_allowed_(std::thread::hardware_concurrency() > 1),
      thread_([this] { turns_.run(); }) {
  pthread_setname_np(thread_.native_handle(), "comm_core");
}

Engine::~Engine() { stop(); }

void Engine::check_process() const {
  if (!forked()) return;
  throw AbortedError(
      "comm_core cannot use a group in a forked child of the process that opened it: start the "
      "child by spawn, or let it open its own group");
}

void Engine::stop() {
  if (forked()) {
    // The thread does not exist in the child, so it can be neither joined nor detached.
    if (thread_.joinable()) new std::thread(std::move(thread_));
    return;
  }
  stop_ = true;
  poller_.wake();
  if (thread_.joinable()) thread_.join();
}

Device& Engine::device(const std::string& host) {
  if (device_ == nullptr) {
    device_ = tcp_device(poller_, host, options_.sockets);
  } else if (device_->address().host() != host) {
    throw InvalidRequestError("this process listens at " + device_->address().text() +
                              " already; a group at " + host + " needs another process");
  }
  return *device_;
}

uint64_t Engine::dropped_connections() const { return device_ != nullptr ? device_->dropped() : 0; }

void Engine::add(OpQueue* queue) {
  queues_.push_back(queue);
  if (ranked_) queue->limit_unsent();
}

void Engine::rank_by_priority() {
  if (ranked_) return;
  ranked_ = true;
  for (OpQueue* queue : queues_) queue->limit_unsent();
}

void Engine::remove(OpQueue* queue) { std::erase(queues_, queue); }

void Engine::warn(const std::string& reason, const OpQueue* except) {
  for (OpQueue* queue : queues_) {
    if (queue != except) queue->warn(reason);
  }
}

void Engine::post(std::function<void()> work, bool wake) {
  {
    std::lock_guard<std::mutex> lock(incoming_mutex_);
    incoming_.push_back(std::move(work));
  }
  turns_.brought(wake);
}

void Engine::submit(OpPtr op, bool wake) {
  op->flight_.note(*op);
  {
    std::lock_guard<std::mutex> lock(finished_mutex_);
    if (under_way_++ == 0) {
      if (lulls_.size() == kLulls) lulls_.pop_front();
      const double since_s = last_finished_s_;
      lulls_.push_back({since_s, std::max(since_s, op->times_.enqueued_s)});
    }
  }
  post([op = std::move(op)] { op->queue_->enqueue(op); }, wake);
}

void Engine::call(const std::function<void()>& work) {
  check_process();
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
    // The engine thread has ended, so the caller does the work.
    lock.unlock();
    turns_.drive_once();
    lock.lock();
  }
  if (error) std::rethrow_exception(error);
}

bool Engine::wait(Op& op, double timeout_s) {
  if (!op.done()) {
    check_process();
    turns_.wait(op, timeout_s > 0 ? now_s() + timeout_s : kNever);
  }
  const bool done = op.done();
  if (done) bury();
  return done;
}

void Engine::await(Op& op, double until_s) {
  if (op.done()) return;
  std::unique_lock<std::mutex> lock(op.mutex_);
  const auto is_done = [&] { return op.done(); };
  if (until_s < kNever) {
    const double left_s = std::max(0.0, until_s - now_s());
    op.changed_.wait_for(lock, std::chrono::duration<double>(left_s), is_done);
  } else {
    op.changed_.wait(lock, is_done);
  }
}

void Engine::bury() {
  std::vector<std::shared_ptr<void>> dead;
  std::lock_guard<std::mutex> lock(finished_mutex_);
  dead.swap(graveyard_);
  // `dead` is destroyed after the lock is released: destroying a tensor may need Python's GIL.
}

std::vector<Event> Engine::events() {
  std::lock_guard<std::mutex> lock(finished_mutex_);
  std::vector<Event> ordered(events_.begin() + long(next_event_), events_.end());
  ordered.insert(ordered.end(), events_.begin(), events_.begin() + long(next_event_));
  return ordered;
}

std::vector<Lull> Engine::lulls(double after_s) {
  std::lock_guard<std::mutex> lock(finished_mutex_);
  auto first = lulls_.end();
  while (first != lulls_.begin() && std::prev(first)->until_s > after_s) --first;
  return {first, lulls_.end()};
}

void Engine::complete(const OpPtr& op, std::exception_ptr error) {
  if (op->spec_.epilogue && !op->state_.followed && !error) {
    try {
      while (!op->spec_.epilogue()) {
      }
    } catch (...) {
      error = std::current_exception();
    }
  }
  op->times_.finished_s = now_s();
  if (op->times_.started_s == 0) op->times_.started_s = op->times_.finished_s;
  last_finished_s_ = op->times_.finished_s;
  op->flight_.finished(op->times_.finished_s, error != nullptr);
  {
    std::lock_guard<std::mutex> lock(finished_mutex_);
    --under_way_;
    const Event event{
        op->spec_.kind,      op->spec_.dtype,   op->spec_.priority, op->queue_->number(),
        op->state_.sequence, op->total_bytes(), op->times_,         !error};
    if (events_.size() < kMaxEvents) {
      events_.push_back(event);
    } else {
      events_[next_event_] = event;
      next_event_ = (next_event_ + 1) % kMaxEvents;
    }
    // Tensors are destroyed in a caller's thread, because that may need Python's GIL.
    graveyard_.push_back(std::move(op->spec_.keep_alive));
    graveyard_.push_back(
        std::make_shared<std::function<bool()>>(std::exchange(op->spec_.epilogue, nullptr)));
  }
  auto callbacks = op->finish(error);
  if (callbacks.empty()) return;
  std::lock_guard<std::mutex> lock(finished_mutex_);
  graveyard_.push_back(std::make_shared<std::vector<std::function<void()>>>(std::move(callbacks)));
}

namespace {

// Steps between polls of connections and messages while data moves.
constexpr int kStepsBetweenPolls = 64;
// Spin iterations, a few microseconds: longer than a peer's memory copy, shorter than a context
// switch.
constexpr int kSpins = 200;
// Before it sleeps, a waiting caller yields the processor for up to kGiveWayS, for operations of up
// to kGiveWayBytes: halting and waking an idle virtual processor takes longer than the operation.
constexpr double kGiveWayS = 50e-6;
constexpr uint64_t kGiveWayBytes = 64 << 10;
// While an urgent operation makes progress, less urgent ones send nothing: TCP would share the link
// equally between their connections, and their queued packets would delay the urgent messages. They
// send again kHeldS after its last progress, because a peer that has started the urgent operation
// may be waiting for a less urgent one. If no peer has started it, they send again after
// kHeldAloneS, so that the link does not idle. Both are times of the network, so a slower emulated
// network needs longer ones.
constexpr double kHeldS = 10e-3, kHeldAloneS = 1e-3;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

bool Engine::moved() {
  if (++steps_ % kStepsBetweenPolls != 0) return false;
  look();
  next_deadline_s();
  return true;
}

bool Engine::linger(const Op* until) {
  if (spin_allowed_ && spin()) return true;
  const bool gives_way = until != nullptr && until->total_bytes() <= kGiveWayBytes;
  return gives_way && give_way(*until);
}

void Engine::announce_sleep(bool asleep) {
  for (OpQueue* queue : queues_) queue->announce_sleep(asleep);
}

void Engine::sleep(double until_s) { poller_.wait(Watch::when_active, until_s - now_s()); }

// Only waits: a caller may be driving at the same time, and then it serves the events.
void Engine::nap(double until_s) { poller_.wait_only(Watch::always, until_s - now_s()); }

bool Engine::spin() {
  bool worth_it = false;
  for (OpQueue* queue : queues_) worth_it = worth_it || queue->spins();
  if (!worth_it) return false;
  for (int i = 0; i < kSpins; ++i) {
    pause();
    if (i % 4 == 3 && pass()) return true;
  }
  return false;
}

// Other threads get the processor when they need it; they wait for it no longer than a pass takes.
bool Engine::give_way(const Op& until) {
  const bool message = point_to_point(until.spec_.kind);
  const double end = now_s() + kGiveWayS;
  do {
    sched_yield();
    if (message) poller_.wait(Watch::always, 0);
    if (turns_.incoming() || pass() || until.done()) return true;
  } while (now_s() < end);
  return false;
}

void Engine::take() {
  std::vector<std::function<void()>> taken;
  {
    std::lock_guard<std::mutex> lock(incoming_mutex_);
    taken.swap(incoming_);
  }
  for (auto& work : taken) {
    work();
    // Destroys what the work holds before the next one runs. Otherwise, after a group has closed
    // and its caller has dropped the engine, the engine thread could hold the last reference to it.
    work = nullptr;
  }
}

bool Engine::under_way() const {
  return std::any_of(queues_.begin(), queues_.end(),
                     [](OpQueue* queue) { return queue->head() != nullptr; });
}

bool Engine::pass() {
  heads_.clear();
  for (OpQueue* queue : queues_) {
    const Op* op = queue->head();
    if (op != nullptr) heads_.push_back({op->spec().priority, op->times().enqueued_s, queue});
  }
  // Most urgent first, then oldest. The first one nearly always makes progress, so a heap is
  // cheaper than a sort.
  const auto later = [](const Head& a, const Head& b) {
    return a.priority != b.priority ? a.priority < b.priority : a.enqueued_s > b.enqueued_s;
  };
  std::make_heap(heads_.begin(), heads_.end(), later);
  held_until_s_ = kNever;
  int urgent = std::numeric_limits<int>::min();
  for (auto end = heads_.end(); end != heads_.begin(); --end) {
    std::pop_heap(heads_.begin(), end, later);
    const Head& head = *(end - 1);
    OpQueue* const queue = head.queue;
    if (queue->step(head.priority < urgent)) return true;
    if (!ranked_) continue;
    const double held_s = (queue->met() ? kHeldS : kHeldAloneS) * options_.time_scale;
    const double until_s = queue->moved_s() + held_s;
    if (now_s() >= until_s) continue;
    urgent = std::max(urgent, head.priority);
    held_until_s_ = std::min(held_until_s_, until_s);
  }
  return false;
}

// Fails operations whose timeout has passed, and drops connections that authenticate too slowly.
double Engine::next_deadline_s() {
  const double now = now_s();
  double next = device_ != nullptr ? device_->next_deadline_s(now) : kNever;
  next = std::min(next, held_until_s_);
  checked_ = queues_;  // a queue that fails may change queues_
  for (OpQueue* queue : checked_) next = std::min(next, queue->next_deadline_s(now));
  return next;
}

}  // namespace comm_core
