// Operations with different blocks for different ranks: gather, scatter, all_to_all, messages.
#include "arguments.h"

namespace comm_core {

using c10d::OpType;

WorkPtr CoreBackend::gather(TensorLists& outputs, TensorList& inputs,
                            const c10d::GatherOptions& options) {
  const at::Tensor& input = only(inputs, "gather");
  Call call("gather", OpKind::gather);
  call.spec.root = rank_of(options.rootRank, size_, "gather: root");
  call.spec.inputs = {call.input(input)};
  TensorList result;
  if (call.spec.root == rank_) {
    expect_count(outputs.size(), 1, "gather: output lists");
    expect_count(outputs[0].size(), size_, "gather: output tensors (one per rank)");
    result = outputs[0];
    for (const at::Tensor& output : result) {
      TORCH_CHECK_VALUE(output.numel() == input.numel(),
                        "gather: all tensors must have the same number of elements");
      call.spec.outputs.push_back(call.output(output));
    }
  } else {
    TORCH_CHECK_VALUE(outputs.empty() || outputs[0].empty(), "gather: only the root takes outputs");
  }
  return submit(std::move(call), OpType::GATHER, result, options);
}

WorkPtr CoreBackend::scatter(TensorList& outputs, TensorLists& inputs,
                             const c10d::ScatterOptions& options) {
  const at::Tensor& output = only(outputs, "scatter");
  Call call("scatter", OpKind::scatter);
  call.spec.root = rank_of(options.rootRank, size_, "scatter: root");
  call.spec.outputs = {call.output(output)};
  if (call.spec.root == rank_) {
    expect_count(inputs.size(), 1, "scatter: input lists");
    expect_count(inputs[0].size(), size_, "scatter: input tensors (one per rank)");
    for (const at::Tensor& input : inputs[0]) {
      TORCH_CHECK_VALUE(input.numel() == output.numel(),
                        "scatter: all tensors must have the same number of elements");
      call.spec.inputs.push_back(call.input(input));
    }
  } else {
    TORCH_CHECK_VALUE(inputs.empty() || inputs[0].empty(), "scatter: only the root takes inputs");
  }
  return submit(std::move(call), OpType::SCATTER, outputs, options);
}

WorkPtr CoreBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                   std::vector<int64_t>& output_sizes,
                                   std::vector<int64_t>& input_sizes,
                                   const c10d::AllToAllOptions& options) {
  Call call("all_to_all_single", OpKind::all_to_all);
  const ConstSpan in = call.input(input);
  const Span out = call.output(output);
  // Divides `whole` into one block per rank. `sizes` are numbers of rows; empty: equal parts.
  const auto parts = [&](const auto& whole, const at::Tensor& tensor, std::vector<int64_t> sizes) {
    const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
    if (sizes.empty()) {
      TORCH_CHECK_VALUE(rows % size_ == 0, "all_to_all_single: ", rows,
                        " rows cannot be divided into ", size_, " equal parts");
      sizes.assign(size_t(size_), rows / size_);
    }
    expect_count(sizes.size(), size_, "all_to_all_single: split sizes (one per rank)");
    std::vector<std::decay_t<decltype(whole)>> blocks;
    int64_t total = 0;
    const size_t row_bytes = rows == 0 ? 0 : tensor.nbytes() / size_t(rows);
    for (int64_t size : sizes) {
      TORCH_CHECK_VALUE(size >= 0, "all_to_all_single: negative split size: ", size);
      blocks.push_back({whole.data + size_t(total) * row_bytes, size_t(size) * row_bytes});
      total += size;
    }
    TORCH_CHECK_VALUE(total == rows, "all_to_all_single: the split sizes add up to ", total,
                      ", but the tensor has ", rows, " rows");
    return blocks;
  };
  call.spec.inputs = parts(in, input, input_sizes);
  call.spec.outputs = parts(out, output, output_sizes);
  return submit(std::move(call), OpType::ALLTOALL_BASE, {output}, options);
}

WorkPtr CoreBackend::alltoall(TensorList& outputs, TensorList& inputs,
                              const c10d::AllToAllOptions& options) {
  expect_count(outputs.size(), size_, "all_to_all: output tensors (one per rank)");
  expect_count(inputs.size(), size_, "all_to_all: input tensors (one per rank)");
  Call call("all_to_all", OpKind::all_to_all);
  for (const at::Tensor& input : inputs) call.spec.inputs.push_back(call.input(input));
  for (const at::Tensor& output : outputs) call.spec.outputs.push_back(call.output(output));
  return submit(std::move(call), OpType::ALLTOALL, outputs, options);
}

WorkPtr CoreBackend::message(OpKind kind, OpType type, TensorList& tensors, int peer, int tag) {
  Call call(name(kind), kind);
  const at::Tensor& tensor = only(tensors, name(kind));
  call.spec.peer = peer;
  call.spec.tag = uint64_t(tag);
  if (kind == OpKind::send) {
    call.spec.inputs = {call.input(tensor)};
  } else {
    call.spec.outputs = {call.output(tensor)};
  }
  return submit(std::move(call), type, tensors, Milliseconds(0), true);
}

WorkPtr CoreBackend::send(TensorList& tensors, int peer, int tag) {
  return message(OpKind::send, OpType::SEND, tensors, peer, tag);
}

WorkPtr CoreBackend::recv(TensorList& tensors, int peer, int tag) {
  return message(OpKind::recv, OpType::RECV, tensors, peer, tag);
}

WorkPtr CoreBackend::recvAnysource(TensorList& tensors, int tag) {
  return message(OpKind::recv, OpType::RECVANYSOURCE, tensors, -1, tag);
}

}  // namespace comm_core
