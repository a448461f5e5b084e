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

// Calls back outside the engine, whose thread must never wait for Python's lock.
void call_back(std::function<void()> callback);
// Ends the thread behind `call_back` after what is queued has run.
void stop_calling_back();

}  // namespace comm_core
