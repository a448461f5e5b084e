#include <algorithm>
#include <numeric>

#include "backend.h"
#include "calls.h"

namespace comm_core::mpi {
namespace {

using c10d::OpType;

// Elements per rank. Splits count rows; without any, every rank has the same number of rows.
std::vector<int64_t> row_blocks(const char* name, const at::Tensor& tensor,
                                const std::vector<int64_t>& splits, int ranks) {
  TORCH_CHECK_WITH(ValueError, tensor.dim() > 0, name, ": a tensor without dimensions has no rows");
  const int64_t rows = tensor.size(0);
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  if (splits.empty()) {
    TORCH_CHECK_WITH(ValueError, rows % ranks == 0, name, ": ", rows,
                     " rows do not divide evenly among ", ranks, " ranks");
    return std::vector<int64_t>(ranks, rows / ranks * row);
  }
  const bool fits = splits.size() == static_cast<size_t>(ranks) &&
                    std::all_of(splits.begin(), splits.end(), [](int64_t n) { return n >= 0; }) &&
                    std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows;
  TORCH_CHECK_WITH(ValueError, fits, name, ": the splits must be ", ranks,
                   " counts that sum to the tensor's ", rows, " rows");
  std::vector<int64_t> sizes;
  for (const int64_t split : splits) sizes.push_back(split * row);
  return sizes;
}

}  // namespace

MpiBackend::Result MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                             std::vector<int64_t>& output_splits,
                                             std::vector<int64_t>& input_splits,
                                             const c10d::AllToAllOptions& options) {
  const char* const name = "all_to_all_single";
  Buffer out(name, {output});
  Buffer in(name, {input});
  Blocks out_blocks(name, row_blocks(name, output, output_splits, size_));
  Blocks in_blocks(name, row_blocks(name, input, input_splits, size_));
  return exchange(name, OpType::ALLTOALL_BASE, std::move(out), std::move(in), std::move(out_blocks),
                  std::move(in_blocks), options.timeout);
}

MpiBackend::Result MpiBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllToAllOptions& options) {
  const char* const name = "all_to_all";
  check_list(name, {outputs});
  check_list(name, {inputs});
  Buffer out(name, outputs);
  Buffer in(name, inputs);
  Blocks out_blocks(name, outputs);
  Blocks in_blocks(name, inputs);
  return exchange(name, OpType::ALLTOALL, std::move(out), std::move(in), std::move(out_blocks),
                  std::move(in_blocks), options.timeout);
}

// Always the "v" operation: equal blocks here do not mean equal blocks on every rank, and all ranks
// must make the same call.
MpiBackend::Result MpiBackend::exchange(const char* name, OpType type, Buffer out, Buffer in,
                                        Blocks out_blocks, Blocks in_blocks,
                                        std::chrono::milliseconds timeout) {
  check_same_type(name, out, in);
  TORCH_CHECK_WITH(ValueError, out_blocks.counts[rank_] == in_blocks.counts[rank_], name,
                   ": this rank sends itself ", in_blocks.counts[rank_], " elements but expects ",
                   out_blocks.counts[rank_]);
  in.separate_from(out);
  in.fill();
  Plan plan = plan_of(type, name);
  plan.bytes = std::max(in.bytes(), out.bytes());
  plan.outputs = out.parts();
  plan.start = [out, in, out_blocks, in_blocks, comm = group_->comm()](RequestList& requests) {
    add_request(requests, "MPI_Ialltoallv", [&](MPI_Request* request) {
      return MPI_Ialltoallv(in.data(), in_blocks.counts.data(), in_blocks.starts.data(), in.type(),
                            out.data(), out_blocks.counts.data(), out_blocks.starts.data(),
                            out.type(), comm, request);
    });
  };
  plan.finish = [out] { out.spill(); };
  return submit(std::move(plan), timeout);
}

}  // namespace comm_core::mpi
