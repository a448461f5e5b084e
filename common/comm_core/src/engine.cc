#include "engine.h"

#include <pthread.h>

#include <algorithm>
#include <limits>

#include "clock.h"
#include "group.h"

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
  {
    std::lock_guard<std::mutex> lock(finished_mutex_);
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

}  // namespace comm_core
