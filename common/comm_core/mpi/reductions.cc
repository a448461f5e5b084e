#include "backend.h"
#include "calls.h"
#include "datatypes.h"

namespace comm_core::mpi {
namespace {

using c10d::OpType;
using c10d::ReduceOp;

void bring_home(const Buffer& result, const ReduceOp& op, int ranks) {
  if (op.op_ == ReduceOp::AVG) {
    divide(result.data(), result.elements(), result.scalar_type(), ranks);
  }
  result.spill();
}

void start_allreduce(RequestList& requests, const Buffer& buffer, MPI_Op op, MPI_Comm comm) {
  add_request(requests, "MPI_Iallreduce", [&](MPI_Request* request) {
    return MPI_Iallreduce(MPI_IN_PLACE, buffer.data(), buffer.count(), buffer.type(), op, comm,
                          request);
  });
}

}  // namespace

MpiBackend::Result MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const Buffer buffer("all_reduce", {only("all_reduce", tensors)});
  const MPI_Op op = mpi_op(options.reduceOp, buffer.scalar_type());
  buffer.fill();
  Plan plan = plan_of(OpType::ALLREDUCE, "all_reduce");
  plan.bytes = buffer.bytes();
  plan.outputs = tensors;
  plan.start = [buffer, op, comm = group_->comm()](RequestList& requests) {
    start_allreduce(requests, buffer, op, comm);
  };
  plan.finish = [buffer, op = options.reduceOp, ranks = size_] { bring_home(buffer, op, ranks); };
  return submit(std::move(plan), options.timeout);
}

MpiBackend::Result MpiBackend::allreduce_coalesced(Tensors& tensors,
                                                   const c10d::AllreduceCoalescedOptions& options) {
  const char* const name = "all_reduce_coalesced";
  Plan plan = plan_of(OpType::ALLREDUCE_COALESCED, name);
  std::vector<Buffer> buffers;
  std::vector<MPI_Op> ops;
  for (const at::Tensor& tensor : tensors) {
    const Buffer& buffer = buffers.emplace_back(name, Tensors{tensor});
    ops.push_back(mpi_op(options.reduceOp, buffer.scalar_type()));
    plan.bytes += buffer.bytes();
  }
  for (const Buffer& buffer : buffers) buffer.fill();
  plan.outputs = tensors;
  plan.start = [buffers, ops, comm = group_->comm()](RequestList& requests) {
    for (size_t i = 0; i < buffers.size(); ++i) {
      start_allreduce(requests, buffers[i], ops[i], comm);
    }
  };
  plan.finish = [buffers, op = options.reduceOp, ranks = size_] {
    for (const Buffer& buffer : buffers) bring_home(buffer, op, ranks);
  };
  return submit(std::move(plan), options.timeout);
}

MpiBackend::Result MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const Buffer buffer("reduce", {only("reduce", tensors)});
  const MPI_Op op = mpi_op(options.reduceOp, buffer.scalar_type());
  const int root = rank_in_group("reduce", options.rootRank);
  const bool is_root = root == rank_;
  buffer.fill();
  Plan plan = plan_of(OpType::REDUCE, "reduce");
  plan.bytes = buffer.bytes();
  plan.outputs = tensors;
  plan.start = [buffer, op, root, is_root, comm = group_->comm()](RequestList& requests) {
    add_request(requests, "MPI_Ireduce", [&](MPI_Request* request) {
      return MPI_Ireduce(is_root ? MPI_IN_PLACE : buffer.data(), is_root ? buffer.data() : nullptr,
                         buffer.count(), buffer.type(), op, root, comm, request);
    });
  };
  if (is_root) {
    plan.finish = [buffer, op = options.reduceOp, ranks = size_] { bring_home(buffer, op, ranks); };
  }
  return submit(std::move(plan), options.timeout);
}

MpiBackend::Result MpiBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::ReduceScatterOptions& options) {
  const char* const name = "reduce_scatter_tensor";
  Buffer out(name, {output});
  const Buffer in(name, {input});
  check_same_type(name, out, in);
  check_sizes(name, in, size_, out);
  const MPI_Op op = mpi_op(options.reduceOp, in.scalar_type());
  out.separate_from(in);
  in.fill();
  Plan plan = plan_of(OpType::_REDUCE_SCATTER_BASE, name);
  plan.bytes = in.bytes();
  plan.outputs = {output};
  plan.start = [out, in, op, comm = group_->comm()](RequestList& requests) {
    add_request(requests, "MPI_Ireduce_scatter_block", [&](MPI_Request* request) {
      return MPI_Ireduce_scatter_block(in.data(), out.data(), out.count(), out.type(), op, comm,
                                       request);
    });
  };
  plan.finish = [out, op = options.reduceOp, ranks = size_] { bring_home(out, op, ranks); };
  return submit(std::move(plan), options.timeout);
}

MpiBackend::Result MpiBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                              const c10d::ReduceScatterOptions& options) {
  const char* const name = "reduce_scatter";
  Buffer out(name, {only(name, outputs)});
  check_list(name, inputs);
  const Buffer in(name, inputs.front());
  check_same_type(name, out, in);
  const Blocks blocks(name, in.parts());
  TORCH_CHECK_WITH(ValueError, blocks.counts[rank_] == out.elements(), name, ": output of ",
                   out.elements(), " elements, input ", rank_, " of ", blocks.counts[rank_]);
  const MPI_Op op = mpi_op(options.reduceOp, in.scalar_type());
  out.separate_from(in);
  in.fill();
  Plan plan = plan_of(OpType::REDUCE_SCATTER, name);
  plan.bytes = in.bytes();
  plan.outputs = outputs;
  plan.start = [out, in, blocks, op, comm = group_->comm()](RequestList& requests) {
    add_request(requests, "MPI_Ireduce_scatter", [&](MPI_Request* request) {
      return MPI_Ireduce_scatter(in.data(), out.data(), blocks.counts.data(), out.type(), op, comm,
                                 request);
    });
  };
  plan.finish = [out, op = options.reduceOp, ranks = size_] { bring_home(out, op, ranks); };
  return submit(std::move(plan), options.timeout);
}

}  // namespace comm_core::mpi
