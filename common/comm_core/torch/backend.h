// The torch.distributed backend "comm_core".
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/regimes.h"
#include "group/group.h"
#include "messages/windows.h"
#include "tensors.h"
#include "work.h"

namespace comm_core {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using TensorList = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;
using Milliseconds = std::chrono::milliseconds;

class CoreBackend : public c10d::Backend {
 public:
  // Connects to the other ranks, which it finds through `store`. `towards`: host of the rendezvous,
  // which selects the network interface; may be empty. Throws DistBackendError, ValueError.
  CoreBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
              const std::string& name, const std::string& towards, double timeout_s);
  ~CoreBackend() override;

  const std::string getBackendName() const override { return "comm_core"; }
  // With true, torch 2.13 does not end a coalescing block that an error has left; its all_reduce on
  // this group then does nothing. Blocks that a user begins explicitly work with false as well.
  bool supportsCoalescing() const override { return false; }
  void setTimeout(Milliseconds timeout) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(TensorList& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(TensorList& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(TensorList& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(TensorList& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, TensorList& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, TensorList& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, TensorList& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(TensorList& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(TensorList& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(TensorList& outputs, TensorList& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(TensorList& tensors, int peer, int tag) override;
  WorkPtr recv(TensorList& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(TensorList& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return group_->sequence(); }

  void abort() override;
  void shutdown() override;

  // One-sided memory. The backend holds `memory` [slots, elements] until `remove_window`. The
  // caller chooses `number`, the same on all ranks. All throw ValueError, DistBackendError.
  void add_window(int64_t number, const at::Tensor& memory);
  void remove_window(int64_t number);
  std::vector<uint64_t> window_versions(int64_t number);
  at::Tensor read_window(int64_t number, int64_t first, int64_t count, bool reset, bool clear);
  // `kind`: put, accumulate, get, lock, unlock.
  WorkPtr window_operation(const std::string& kind, int64_t number, int peer, int64_t slot,
                           int64_t offset, const std::optional<at::Tensor>& tensor,
                           c10d::ReduceOp::RedOpType op);

  // The regimes of this group (see collectives/regimes.h). Throws ValueError.
  std::vector<Regime> regimes_of(const std::string& operation) const;

  const std::shared_ptr<Group>& group() const { return group_; }

 private:
  // An operation before it is submitted: its specification and the memory of its tensors.
  struct Call : Tensors {
    Call(const char* what, OpKind kind) : Tensors(what) { spec.kind = kind; }
    OpSpec spec;
  };

  // Submits the operation. `result` is the value of the work's future.
  WorkPtr submit(Call call, c10d::OpType type, TensorList result, Milliseconds timeout, bool async);
  template <typename CallOptions>
  WorkPtr submit(Call call, c10d::OpType type, TensorList result, const CallOptions& options) {
    return submit(std::move(call), type, std::move(result), options.timeout, options.asyncOp);
  }
  WorkPtr message(OpKind kind, c10d::OpType type, TensorList& tensors, int peer, int tag);
  // Combines several works into one. `kind` and `shown` describe the profiler's event; with a null
  // `kind` only the parts have events.
  WorkPtr together(std::vector<WorkPtr> works, const char* kind, const TensorList& shown,
                   c10d::OpType type, TensorList result);
  // Combines the works of one(0) .. one(count - 1). The profiler shows only the whole.
  WorkPtr each(size_t count, const std::function<WorkPtr(size_t)>& one, const char* kind,
               const TensorList& shown, c10d::OpType type, const TensorList& result);

  void on_windows(const std::function<void(Windows&)>& work);
  at::Tensor memory_of(int64_t number);

  std::shared_ptr<Group> group_;
  std::mutex window_mutex_;
  std::map<int64_t, at::Tensor> window_memory_;  // by number, under window_mutex_
};

// All-reduces of one priority that a caller starts one by one and awaits together, without a Work
// for each.
class Batch {
 public:
  Batch(c10::intrusive_ptr<CoreBackend> backend, int priority)
      : backend_(std::move(backend)), priority_(priority) {}
  // Starts to sum `tensor` in place. `wake`: the engine takes it at once; otherwise with
  // the next operation that wakes it, or when the caller waits.
  void start(const at::Tensor& tensor, bool wake);
  // Waits for all; throws the first error.
  void wait();
  // True if all have ended, or will end without the caller.
  bool done() const;

 private:
  c10::intrusive_ptr<CoreBackend> backend_;
  int priority_;
  std::vector<OpPtr> ops_;
};

// Throws ValueError if the core does not support the reduction.
ReduceOp op_of(const c10d::ReduceOp& op, const std::string& what);

// The priority of the operations that this thread submits; higher goes first (default 0).
void set_priority(int priority);
int priority();

// During its lifetime, the operations that this thread submits have this priority.
class WithPriority {
 public:
  explicit WithPriority(int level) : previous_(priority()) { set_priority(level); }
  ~WithPriority() { set_priority(previous_); }
  WithPriority(const WithPriority&) = delete;
  WithPriority& operator=(const WithPriority&) = delete;

 private:
  int previous_;
};

// The regimes of `ranks` on `hosts`, with the settings of the environment. Throws ValueError.
std::vector<Regime> regimes_of(const std::string& operation, int ranks, int hosts);

// The engine of this process: created on first use, ended by `shut_down_engine`.
std::shared_ptr<Engine> process_engine();
void shut_down_engine();

}  // namespace comm_core
