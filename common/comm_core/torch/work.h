// What torch.distributed hands its users for an operation under way.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <vector>

#include "engine/op.h"

namespace comm_core {

// Turns an error of the core into torch's: DistBackendError, or ValueError for a bad request.
[[noreturn]] void throw_as_torch(const std::exception_ptr& error);

class CoreWork : public c10d::Work {
 public:
  // `synchronize`: called in a waiter's thread after the end, e.g. to order CUDA streams.
  // `title` and `shown`: of the profiler's event; no title, no event.
  CoreWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& shown,
           std::vector<OpPtr> ops, std::vector<at::Tensor> result,
           std::function<void()> synchronize);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;

  // Of all its operations: first enqueued, first started, last finished. Throws ValueError while
  // one is running.
  OpTimes times() const;
  const std::vector<OpPtr>& ops() const { return ops_; }

 private:
  std::exception_ptr error() const;

  std::vector<OpPtr> ops_;
  std::vector<at::Tensor> result_;
  std::function<void()> synchronize_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// What a thread has begun as one operation. torch ends no block that an error has left: it is over,
// too, when the thread waits for one of its parts, for which nobody has any other use.
struct Block {
  const void* backend = nullptr;  // of whose operations it is; null: there is none
  std::vector<OpPtr> ops;
  std::vector<std::function<void()>> synchronize;

  void add(const OpPtr& op, std::function<void()> of_device) {
    ops.push_back(op);
    if (of_device) synchronize.push_back(std::move(of_device));
  }
};
Block& block();  // this thread's

// Calls back outside the engine, whose thread must never wait for Python's lock.
void call_back(std::function<void()> callback);
// The same for what may block on a device, strictly one after the other.
void call_in_order(std::function<void()> work);
// Ends the threads behind them after what is queued has run; nothing is called back from then on.
void stop_calling_back();
// Python is about to end, says the thread that ends it. Others that wait for an operation stay
// where they are: the interpreter ends a thread that comes back then, in C++ frames that must not
// be left so, and the process would abort.
void keep_waiting_threads();

}  // namespace comm_core
