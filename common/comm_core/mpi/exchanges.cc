#include "backend.h"
#include "calls.h"

namespace comm_core::mpi {

using c10d::OpType;

MpiBackend::Result MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const Buffer buffer("broadcast", {only("broadcast", tensors)});
  const int root = rank_in_group("broadcast", options.rootRank);
  if (root == rank_) buffer.fill();
  Plan plan = plan_of(OpType::BROADCAST, "broadcast");
  plan.bytes = buffer.bytes();
  plan.outputs = tensors;
  plan.start = [buffer, root, comm = group_->comm()](RequestList& requests) {
    add_request(requests, "MPI_Ibcast", [&](MPI_Request* request) {
      return MPI_Ibcast(buffer.data(), buffer.count(), buffer.type(), root, comm, request);
    });
  };
  if (root != rank_) plan.finish = [buffer] { buffer.spill(); };
  return submit(std::move(plan), options.timeout);
}

MpiBackend::Result MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::AllgatherOptions& options) {
  const char* const name = "all_gather_into_tensor";
  const Buffer out(name, {output});
  Buffer in(name, {input});
  check_same_type(name, out, in);
  check_sizes(name, out, size_, in);
  const bool in_place = in.is_part_of(out, rank_ * in.elements());
  if (!in_place) in.separate_from(out);
  in.fill();
  Plan plan = plan_of(OpType::_ALLGATHER_BASE, name);
  plan.bytes = out.bytes();
  plan.outputs = {output};
  plan.start = [out, in, in_place, comm = group_->comm()](RequestList& requests) {
    add_request(requests, "MPI_Iallgather", [&](MPI_Request* request) {
      return MPI_Iallgather(in_place ? MPI_IN_PLACE : in.data(), in.count(), in.type(), out.data(),
                            in.count(), out.type(), comm, request);
    });
  };
  plan.finish = [out] { out.spill(); };
  return submit(std::move(plan), options.timeout);
}

MpiBackend::Result MpiBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& options) {
  const char* const name = "all_gather";
  check_list(name, outputs);
  const Buffer out(name, outputs.front());
  Buffer in(name, {only(name, inputs)});
  check_same_type(name, out, in);
  const Blocks blocks(name, out.parts());
  TORCH_CHECK_WITH(ValueError, blocks.counts[rank_] == in.elements(), name, ": input of ",
                   in.elements(), " elements, output ", rank_, " of ", blocks.counts[rank_]);
  in.separate_from(out);
  in.fill();
  Plan plan = plan_of(OpType::ALLGATHER, name);
  plan.bytes = out.bytes();
  plan.outputs = outputs.front();
  plan.start = [out, in, blocks, comm = group_->comm()](RequestList& requests) {
    add_request(requests, "MPI_Iallgatherv", [&](MPI_Request* request) {
      return MPI_Iallgatherv(in.data(), in.count(), in.type(), out.data(), blocks.counts.data(),
                             blocks.starts.data(), out.type(), comm, request);
    });
  };
  plan.finish = [out] { out.spill(); };
  return submit(std::move(plan), options.timeout);
}

MpiBackend::Result MpiBackend::gather(TensorLists& outputs, Tensors& inputs,
                                      const c10d::GatherOptions& options) {
  const char* const name = "gather";
  Buffer in(name, {only(name, inputs)});
  const int root = rank_in_group(name, options.rootRank);
  Plan plan = plan_of(OpType::GATHER, name);
  plan.bytes = in.bytes();
  if (root != rank_) {
    in.fill();
    plan.start = [in, root, comm = group_->comm()](RequestList& requests) {
      add_request(requests, "MPI_Igather", [&](MPI_Request* request) {
        return MPI_Igather(in.data(), in.count(), in.type(), nullptr, 0, in.type(), root, comm,
                           request);
      });
    };
    return submit(std::move(plan), options.timeout);
  }
  check_list(name, outputs);
  const Buffer out(name, outputs.front());
  check_same_type(name, out, in);
  check_sizes(name, out, size_, in);
  TORCH_CHECK_WITH(ValueError, Blocks(name, out.parts()).equal(), name,
                   ": the output tensors differ in size");
  in.separate_from(out);
  in.fill();
  plan.bytes = out.bytes();
  plan.outputs = outputs.front();
  plan.start = [out, in, root, comm = group_->comm()](RequestList& requests) {
    add_request(requests, "MPI_Igather", [&](MPI_Request* request) {
      return MPI_Igather(in.data(), in.count(), in.type(), out.data(), in.count(), out.type(), root,
                         comm, request);
    });
  };
  plan.finish = [out] { out.spill(); };
  return submit(std::move(plan), options.timeout);
}

MpiBackend::Result MpiBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                       const c10d::ScatterOptions& options) {
  const char* const name = "scatter";
  Buffer out(name, {only(name, outputs)});
  const int root = rank_in_group(name, options.rootRank);
  Plan plan = plan_of(OpType::SCATTER, name);
  plan.bytes = out.bytes();
  plan.outputs = outputs;
  if (root != rank_) {
    plan.start = [out, root, comm = group_->comm()](RequestList& requests) {
      add_request(requests, "MPI_Iscatter", [&](MPI_Request* request) {
        return MPI_Iscatter(nullptr, 0, out.type(), out.data(), out.count(), out.type(), root, comm,
                            request);
      });
    };
    plan.finish = [out] { out.spill(); };
    return submit(std::move(plan), options.timeout);
  }
  check_list(name, inputs);
  const Buffer in(name, inputs.front());
  check_same_type(name, out, in);
  check_sizes(name, in, size_, out);
  TORCH_CHECK_WITH(ValueError, Blocks(name, in.parts()).equal(), name,
                   ": the input tensors differ in size");
  out.separate_from(in);
  in.fill();
  plan.bytes = in.bytes();
  plan.start = [out, in, root, comm = group_->comm()](RequestList& requests) {
    add_request(requests, "MPI_Iscatter", [&](MPI_Request* request) {
      return MPI_Iscatter(in.data(), out.count(), in.type(), out.data(), out.count(), out.type(),
                          root, comm, request);
    });
  };
  plan.finish = [out] { out.spill(); };
  return submit(std::move(plan), options.timeout);
}

}  // namespace comm_core::mpi
