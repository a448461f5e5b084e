#include "work.h"

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <thread>

namespace comm_core {

namespace {

// One thread, made when the first callback comes.
class Caller {
 public:
  ~Caller() { stop(); }

  void add(std::function<void()> callback) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(callback));
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    changed_.notify_one();
  }

  void stop() {
    std::thread thread;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      thread = std::move(thread_);
      changed_.notify_one();
    }
    if (thread.joinable()) thread.join();
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = false;
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      std::function<void()> callback = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      callback();
      callback = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
  bool stop_ = false;
};

Caller& caller() {
  // Never destroyed: an engine may outlive any order of static ends.
  static Caller* instance = new Caller;
  return *instance;
}

}  // namespace

void call_back(std::function<void()> callback) { caller().add(std::move(callback)); }

void stop_calling_back() { caller().stop(); }

void throw_as_torch(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const InvalidRequestError& e) {
    C10_THROW_ERROR(ValueError, e.what());
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
    // The profiler's event ends with the operation, not with the last look at this object.
    ops_.back()->on_done(std::exchange(recordFunctionEndCallback_, nullptr));
  }
}

bool CoreWork::isCompleted() {
  return std::all_of(ops_.begin(), ops_.end(), [](const OpPtr& op) { return op->done(); });
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
  TORCH_CHECK(isCompleted(), "the result of an operation that has not ended");
  return result_;
}

void CoreWork::synchronize() {
  if (synchronize_) synchronize_();
}

bool CoreWork::wait(std::chrono::milliseconds timeout) {
  for (const OpPtr& op : ops_) {
    if (!op->wait(std::chrono::duration<double>(timeout).count())) {
      C10_THROW_ERROR(DistBackendError, op->describe() + ": still running after a wait of " +
                                            std::to_string(timeout.count()) + " ms");
    }
  }
  if (const std::exception_ptr found = error()) throw_as_torch(found);
  synchronize();
  return true;
}

void CoreWork::abort() {
  C10_THROW_ERROR(NotImplementedError,
                  "one operation cannot be aborted alone; abort the process group");
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
  for (const OpPtr& op : ops_) {
    op->on_done([left, complete] {
      if (--*left == 0) call_back(complete);
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
