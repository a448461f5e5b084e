#include "backend.h"

#include "calls.h"
#include "datatypes.h"
#include "engine.h"

namespace comm_core::mpi {

using c10d::OpType;

MpiBackend::MpiBackend(std::shared_ptr<Group> group)
    : Backend(group->rank(), group->size()), group_(std::move(group)) {}

c10::intrusive_ptr<c10d::Backend::Options> MpiBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), group_->timeout());
}

Plan MpiBackend::plan_of(OpType type, const char* name) const {
  Plan plan;
  plan.op_type = type;
  plan.name = name;
  return plan;
}

MpiBackend::Result MpiBackend::submit(Plan plan, std::chrono::milliseconds timeout) {
  group_->check_usable(plan.name.c_str());
  const auto limit = timeout > std::chrono::milliseconds(0) ? timeout : group_->timeout();
  auto work = c10::make_intrusive<MpiWork>(group_, std::move(plan), ++sequence_, limit);
  Engine::get().submit(work);
  return work;
}

int MpiBackend::rank_in_group(const char* name, int64_t rank) const {
  TORCH_CHECK_WITH(ValueError, rank >= 0 && rank < size_, name, ": there is no rank ", rank,
                   " in a group of ", size_);
  return static_cast<int>(rank);
}

void MpiBackend::check_tag(const char* name, int tag) const {
  TORCH_CHECK_WITH(ValueError, tag >= 0 && tag <= group_->largest_tag(), name, ": tag ", tag,
                   " is not in MPI's range 0 .. ", group_->largest_tag());
}

void MpiBackend::check_list(const char* name, const TensorLists& lists) const {
  const size_t length = only(name, lists).size();
  TORCH_CHECK_WITH(ValueError, length == static_cast<size_t>(size_), name, ": a list of ", length,
                   " tensors for ", size_, " ranks");
}

MpiBackend::Result MpiBackend::send(Tensors& tensors, int to, int tag) {
  const Buffer buffer("send", {only("send", tensors)});
  const int rank = rank_in_group("send", to);
  check_tag("send", tag);
  buffer.fill();
  Plan plan = plan_of(OpType::SEND, "send");
  plan.bytes = buffer.bytes();
  plan.outputs = tensors;
  plan.start = [buffer, rank, tag, comm = group_->comm()](RequestList& requests) {
    add_request(requests, "MPI_Isend", [&](MPI_Request* request) {
      return MPI_Isend(buffer.data(), buffer.count(), buffer.type(), rank, tag, comm, request);
    });
  };
  return submit(std::move(plan), c10d::kUnsetTimeout);
}

MpiBackend::Result MpiBackend::recv(Tensors& tensors, int from, int tag) {
  return receive("recv", OpType::RECV, tensors, rank_in_group("recv", from), tag);
}

MpiBackend::Result MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive("recv_any_source", OpType::RECVANYSOURCE, tensors, MPI_ANY_SOURCE, tag);
}

MpiBackend::Result MpiBackend::receive(const char* name, OpType type, const Tensors& tensors,
                                       int from, int tag) {
  const Buffer buffer(name, {only(name, tensors)});
  check_tag(name, tag);
  Plan plan = plan_of(type, name);
  plan.bytes = buffer.bytes();
  plan.outputs = tensors;
  plan.receive_type = buffer.type();
  plan.receive_count = buffer.count();
  plan.start = [buffer, from, tag, comm = group_->comm()](RequestList& requests) {
    add_request(requests, "MPI_Irecv", [&](MPI_Request* request) {
      return MPI_Irecv(buffer.data(), buffer.count(), buffer.type(), from, tag, comm, request);
    });
  };
  plan.finish = [buffer] { buffer.spill(); };
  return submit(std::move(plan), c10d::kUnsetTimeout);
}

MpiBackend::Result MpiBackend::barrier(const c10d::BarrierOptions& options) {
  Plan plan = plan_of(OpType::BARRIER, "barrier");
  plan.start = [comm = group_->comm()](RequestList& requests) {
    add_request(requests, "MPI_Ibarrier",
                [&](MPI_Request* request) { return MPI_Ibarrier(comm, request); });
  };
  return submit(std::move(plan), options.timeout);
}

}  // namespace comm_core::mpi
