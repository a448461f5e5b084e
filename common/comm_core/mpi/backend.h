// torch.distributed's collectives and messages over MPI's non-blocking operations.
#pragma once

#include <atomic>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "buffer.h"
#include "group.h"
#include "work.h"

namespace comm_core::mpi {

// Takes CPU tensors of any strides and lengths below 2^31 elements; one that is not contiguous is
// copied. Tensors must not be touched before the operation has ended. Operations throw, before
// anything is sent, c10::TypeError (element type or layout without meaning for the operation),
// c10::ValueError (device, rank, sizes) or c10::DistBackendError (group destroyed or failed); what
// goes wrong later is thrown by the work's `wait`.
class MpiBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using Result = c10::intrusive_ptr<c10d::Work>;

  explicit MpiBackend(std::shared_ptr<Group> group);

  const std::string getBackendName() const override { return "comm_core_mpi"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { group_->set_timeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void shutdown() override { group_->close(); }
  void abort() override { group_->close(); }

  Result allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Result allreduce_coalesced(Tensors& tensors,
                             const c10d::AllreduceCoalescedOptions& options) override;
  Result reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Result reduce_scatter(Tensors& outputs, TensorLists& inputs,
                        const c10d::ReduceScatterOptions& options) override;
  Result _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                              const c10d::ReduceScatterOptions& options) override;

  Result broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Result allgather(TensorLists& outputs, Tensors& inputs,
                   const c10d::AllgatherOptions& options) override;
  Result _allgather_base(at::Tensor& output, at::Tensor& input,
                         const c10d::AllgatherOptions& options) override;
  Result gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Result scatter(Tensors& outputs, TensorLists& inputs,
                 const c10d::ScatterOptions& options) override;
  Result alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Result alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                       std::vector<int64_t>& input_splits,
                       const c10d::AllToAllOptions& options) override;

  Result send(Tensors& tensors, int to, int tag) override;
  Result recv(Tensors& tensors, int from, int tag) override;
  Result recvAnysource(Tensors& tensors, int tag) override;
  Result barrier(const c10d::BarrierOptions& options) override;

 private:
  Plan plan_of(c10d::OpType type, const char* name) const;
  Result submit(Plan plan, std::chrono::milliseconds timeout);
  Result receive(const char* name, c10d::OpType type, const Tensors& tensors, int from, int tag);
  Result exchange(const char* name, c10d::OpType type, Buffer out, Buffer in, Blocks out_blocks,
                  Blocks in_blocks, std::chrono::milliseconds timeout);
  int rank_in_group(const char* name, int64_t rank) const;
  void check_tag(const char* name, int tag) const;
  void check_list(const char* name, const TensorLists& lists) const;

  const std::shared_ptr<Group> group_;
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace comm_core::mpi
