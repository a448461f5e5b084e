#include "work.h"

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "group/group.h"
#include "io/fd.h"

namespace comm_core {

namespace {

// A callback gets this long before another thread runs the next ones. It must be much longer than a
// callback that only waits for a core or for Python's lock, or later ones would overtake it.
constexpr auto kPatience = std::chrono::milliseconds(50);
// Time that callbacks get to end at the end of the process. The other ranks wait for it, too: they
// notice the end of this one by its connections.
constexpr auto kExitPatience = std::chrono::seconds(3);
// Limit on threads: more callbacks that wait for each other are probably a mistake.
constexpr size_t kMostThreads = 64;

// Runs callbacks in order, one at a time. If one takes long, such as a user's callback that waits
// for another future, a further thread runs the callbacks after it.
class Caller {
 public:
  explicit Caller(size_t most_threads) : most_threads_(most_threads) {}

  void add(std::function<void()> callback) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) return;  // the interpreter has ended: nothing may be called back
    queue_.push_back(std::move(callback));
    if (idle_ == 0 && threads_.size() < most_threads_) start();
    changed_.notify_all();
  }

  bool forked() const { return forks_ != forks(); }

  // Returns once all queued callbacks have run, or at `until`. Later ones are dropped. Returns how
  // many are still running: their threads are left to the end of the process.
  size_t stop(std::chrono::steady_clock::time_point until) {
    if (forked()) return 0;  // the threads are the parent's
    std::vector<std::thread> threads;
    std::unique_lock<std::mutex> lock(mutex_);
    stopped_ = true;
    threads.swap(threads_);
    changed_.notify_all();
    const bool all = changed_.wait_until(lock, until, [&] { return ended_ == threads.size(); });
    const size_t running = threads.size() - ended_ - idle_;
    lock.unlock();
    for (std::thread& thread : threads) all ? thread.join() : thread.detach();
    return all ? 0 : running;
  }

 private:
  void start() {
    ++idle_;
    threads_.emplace_back([this] { run(); });
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopped_ || !queue_.empty(); });
      if (queue_.empty()) break;
      if (calling_) {
        const uint64_t call = call_;
        const auto over = [&] { return !calling_ || call_ != call; };
        if (changed_.wait_for(lock, kPatience, over)) continue;
      }
      if (queue_.empty()) continue;
      std::function<void()> callback = std::move(queue_.front());
      queue_.pop_front();
      calling_ = true;
      const uint64_t call = ++call_;
      --idle_;
      if (idle_ == 0 && !queue_.empty() && !stopped_ && threads_.size() < most_threads_) start();
      lock.unlock();
      callback();
      callback = nullptr;
      lock.lock();
      ++idle_;
      if (call_ == call) calling_ = false;  // else another thread runs later callbacks
      changed_.notify_all();
    }
    --idle_;
    ++ended_;
    changed_.notify_all();
  }

  const size_t most_threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;       // number of threads outside callbacks
  size_t ended_ = 0;      // number of threads that have nothing more to do
  uint64_t call_ = 0;     // number of the last callback begun
  bool calling_ = false;  // that callback has not ended
  bool stopped_ = false;
  const uint32_t forks_ = forks();
};

// A forked child gets its own instance. Instances are never destroyed, because an engine may
// outlive static objects.
Caller& own(Caller*& instance, size_t most_threads) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (instance == nullptr || instance->forked()) instance = new Caller(most_threads);
  return *instance;
}

// Deeper callbacks share the last one.
constexpr int kDepths = 8;

Caller& caller(int depth) {
  static Caller* instances[kDepths] = {};
  return own(instances[std::min(depth, kDepths - 1)], kMostThreads);
}

// One thread: its work waits only for devices, and it must start operations in order.
Caller& starter() {
  static Caller* instance = nullptr;
  return own(instance, 1);
}

std::atomic<bool> ending{false};
std::thread::id ending_thread;

void stay_if_ending() {
  if (!ending || std::this_thread::get_id() == ending_thread) return;
  for (;;) pause();
}

}  // namespace

void call_back(int depth, std::function<void()> callback) {
  caller(depth).add(std::move(callback));
}

void call_in_order(std::function<void()> work) { starter().add(std::move(work)); }

void stop_calling_back() {
  const auto until = std::chrono::steady_clock::now() + kExitPatience;
  size_t running = starter().stop(until);
  for (int depth = 0; depth < kDepths; ++depth) running += caller(depth).stop(until);
  if (running == 0) return;
  fprintf(stderr, "comm_core: the process ends although %zu callback(s) of futures still run\n",
          running);
}

void keep_waiting_threads() {
  ending_thread = std::this_thread::get_id();
  ending = true;
}

thread_local bool OrderedFutures::asked = false;

Block& block() {
  thread_local Block of_this_thread;
  return of_this_thread;
}

void throw_as_torch(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const InvalidRequestError& e) {
    C10_THROW_ERROR(ValueError, e.what());
  } catch (const MismatchError& e) {
    throw DistMismatchError({__func__, __FILE__, __LINE__}, e.what());
  } catch (const StoreError& e) {
    C10_THROW_ERROR(DistStoreError, e.what());
  } catch (const CommError& e) {
    C10_THROW_ERROR(DistBackendError, e.what());
  }
}

CoreWork::CoreWork(int rank, c10d::OpType type, const char* title,
                   const std::vector<at::Tensor>& shown, std::vector<OpPtr> ops,
                   std::vector<at::Tensor> result, std::function<void()> synchronize)
    : Work(rank, type, title, shown),
      ops_(std::move(ops)),
      result_(std::move(result)),
      synchronize_(std::move(synchronize)) {
  if (recordFunctionEndCallback_ && !ops_.empty()) {
    // The profiler's event ends with the operation, not when this object is destroyed.
    ops_.back()->on_done(std::exchange(recordFunctionEndCallback_, nullptr));
  }
}

bool CoreWork::isCompleted() {
  return std::all_of(ops_.begin(), ops_.end(), [](const OpPtr& op) { return op->ends(); });
}

std::exception_ptr CoreWork::error() const {
  for (const OpPtr& op : ops_) {
    if (op->done() && op->error()) return op->error();
  }
  return nullptr;
}

bool CoreWork::isSuccess() const {
  return std::all_of(ops_.begin(), ops_.end(),
                     [](const OpPtr& op) { return op->done() && !op->error(); });
}

std::exception_ptr CoreWork::exception() const {
  const std::exception_ptr found = error();
  if (!found) return nullptr;
  try {
    throw_as_torch(found);
  } catch (...) {
    return std::current_exception();
  }
}

int CoreWork::sourceRank() const { return ops_.empty() ? -1 : ops_[0]->source(); }

std::vector<at::Tensor> CoreWork::result() {
  TORCH_CHECK(isCompleted(), "no result yet: the operation has not ended");
  return result_;
}

void CoreWork::synchronize() {
  if (synchronize_) synchronize_();
}

bool CoreWork::wait(std::chrono::milliseconds timeout) {
  const double given_s = std::chrono::duration<double>(timeout).count();
  const double until_s = now_s() + given_s;
  const std::vector<OpPtr>& parts = block().ops;
  if (!ops_.empty() && std::find(parts.begin(), parts.end(), ops_[0]) != parts.end()) block() = {};
  // The last one first: it mostly ends last, and the caller then sleeps once.
  for (auto op = ops_.rbegin(); op != ops_.rend(); ++op) {
    // The time-out covers all operations together; 0 means no limit.
    const bool ended = (*op)->wait(given_s > 0 ? std::max(1e-6, until_s - now_s()) : 0);
    stay_if_ending();
    if (!ended) {
      const auto running = [](const OpPtr& one) { return !one->done(); };
      const auto first = std::find_if(ops_.begin(), ops_.end(), running);
      const OpPtr& shown = first == ops_.end() ? *op : *first;
      C10_THROW_ERROR(DistBackendError, shown->describe() + ": still running after a wait of " +
                                            std::to_string(timeout.count()) + " ms");
    }
  }
  if (const std::exception_ptr found = error()) throw_as_torch(found);
  synchronize();
  return true;
}

void CoreWork::abort() {
  C10_THROW_ERROR(NotImplementedError,
                  "a single operation cannot be aborted; abort the process group");
}

c10::intrusive_ptr<c10::ivalue::Future> CoreWork::getFuture() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (future_) return future_;
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : result_) {
    if (!tensor.device().is_cpu() &&
        std::find(devices.begin(), devices.end(), tensor.device()) == devices.end()) {
      devices.push_back(tensor.device());
    }
  }
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     devices);
  auto left = std::make_shared<std::atomic<size_t>>(ops_.size());
  const auto complete = [future = future_, result = result_, ops = ops_,
                         synchronize = synchronize_] {
    try {
      if (synchronize) synchronize();
      for (const OpPtr& op : ops) {
        if (op->error()) throw_as_torch(op->error());
      }
      future->markCompleted(c10::IValue(result));
    } catch (...) {
      future->setError(std::current_exception());
    }
  };
  if (ops_.empty() || isCompleted()) {
    complete();
    return future_;
  }
  const OpPtr last = ops_.back();
  const bool ordered = OrderedFutures::asked && !point_to_point(last->spec().kind);
  if (ordered) Group::callbacks_to_come(*last);
  const auto call = [last, ordered, complete] {
    {
      const InCallbacks scope(*last, ordered);
      complete();
    }
    if (ordered) Group::callbacks_over(*last);
  };
  for (const OpPtr& op : ops_) {
    op->on_done([left, depth = last->depth(), call] {
      if (--*left == 0) call_back(depth, call);
    });
  }
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> CoreWork::getFutureResult() {
  auto result = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  getFuture()->addCallback([result](c10::ivalue::Future& done) {
    const auto outcome = done.hasError() ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS;
    result->markCompleted(c10::IValue(static_cast<uint8_t>(outcome)));
  });
  return result;
}

float CoreWork::getDuration() const {
  const OpTimes t = times();
  return float((t.finished_s - t.started_s) * 1e3);
}

uint64_t CoreWork::getSequencenumber() const { return ops_.empty() ? 0 : ops_[0]->sequence(); }

OpTimes CoreWork::times() const {
  OpTimes all;
  for (const OpPtr& op : ops_) {
    if (!op->done()) C10_THROW_ERROR(ValueError, op->describe() + " has not ended: no times yet");
    const OpTimes t = op->times();
    const bool first = all.finished_s == 0;
    all.enqueued_s = first ? t.enqueued_s : std::min(all.enqueued_s, t.enqueued_s);
    all.started_s = first ? t.started_s : std::min(all.started_s, t.started_s);
    all.finished_s = std::max(all.finished_s, t.finished_s);
  }
  return all;
}

}  // namespace comm_core
