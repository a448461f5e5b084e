// The handle that torch.distributed returns for an operation in flight.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <vector>

#include "engine/op.h"

namespace comm_core {

// What a MismatchError of the core becomes in torch, where it can be told from a lost peer.
struct DistMismatchError : c10::DistBackendError {
  using c10::DistBackendError::DistBackendError;
  const char* what() const noexcept override { return what_without_backtrace(); }
};

// Converts an error of the core to torch's: DistBackendError, DistMismatchError, DistStoreError, or
// ValueError for an invalid request.
[[noreturn]] void throw_as_torch(const std::exception_ptr& error);

class CoreWork : public c10d::Work {
 public:
  // `title` and `shown`: name and tensors of the profiler's event; a null title means no event.
  // `synchronize`: called in a waiting thread after the end, e.g. to order CUDA streams.
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

  // The earliest enqueue, earliest start and latest finish of all its operations. Throws ValueError
  // while one is running.
  OpTimes times() const;
  const std::vector<OpPtr>& ops() const { return ops_; }

 private:
  std::exception_ptr error() const;

  std::vector<OpPtr> ops_;
  std::vector<at::Tensor> result_;
  std::function<void()> synchronize_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// During its lifetime, the futures that this thread asks for are those of a program whose callbacks
// may submit collectives of the same group. Collectives that are submitted later start when the
// callbacks have returned, so that all ranks keep one order. torch's own C++ code needs no order.
struct OrderedFutures {
  OrderedFutures() { asked = true; }
  ~OrderedFutures() { asked = false; }
  static thread_local bool asked;
};

// Operations that a thread has begun as one (torch's coalescing). torch does not end a block that
// an error has left. A block therefore also ends when the thread waits for one of its parts, which
// no thread does otherwise.
struct Block {
  const void* backend = nullptr;  // the backend of the operations; null: no block is open
  std::vector<OpPtr> ops;
  std::vector<std::function<void()>> synchronize;

  void add(const OpPtr& op, std::function<void()> of_device) {
    ops.push_back(op);
    if (of_device) synchronize.push_back(std::move(of_device));
  }
};
Block& block();  // this thread's

// Runs `callback` outside the engine's thread, which must never wait for Python's lock. Those of
// one depth run in order. Callbacks of a lower depth may wait for them.
void call_back(int depth, std::function<void()> callback);
// Runs `work`, which may block on a device, strictly in the order of the calls.
void call_in_order(std::function<void()> work);
// Ends the threads of the two above after the queued work has run, or says on stderr that some
// still runs after a few seconds. Later work is dropped.
void stop_calling_back();
// The thread that ends Python calls this. From then on, other threads that wait for an operation
// never return: the interpreter would end them inside C++ frames, and the process would abort.
void keep_waiting_threads();

}  // namespace comm_core
