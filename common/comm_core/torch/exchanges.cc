// The operations in which ranks give or get blocks of their own: from or to one, all, or a peer.
#include "arguments.h"

namespace comm_core {

using c10d::OpType;

WorkPtr CoreBackend::gather(TensorLists& outputs, TensorList& inputs,
                            const c10d::GatherOptions& options) {
  const at::Tensor& input = only(inputs, "gather");
  Tensors memory("gather");
  OpSpec spec;
  spec.kind = OpKind::gather;
  spec.root = int(options.rootRank);
  spec.inputs = {memory.input(input)};
  TensorList result;
  if (spec.root == rank_) {
    expect_count(outputs.size(), 1, "gather: output lists");
    expect_count(outputs[0].size(), size_, "gather");
    result = outputs[0];
    for (const at::Tensor& output : result) {
      if (output.numel() != input.numel()) {
        C10_THROW_ERROR(ValueError, "gather: the tensors must all be of one size");
      }
      spec.outputs.push_back(memory.output(output));
    }
  } else if (!outputs.empty() && !outputs[0].empty()) {
    C10_THROW_ERROR(ValueError, "gather: only the root has outputs");
  }
  return submit(std::move(spec), std::move(memory), OpType::GATHER, result, options.timeout,
                options.asyncOp);
}

WorkPtr CoreBackend::scatter(TensorList& outputs, TensorLists& inputs,
                             const c10d::ScatterOptions& options) {
  const at::Tensor& output = only(outputs, "scatter");
  Tensors memory("scatter");
  OpSpec spec;
  spec.kind = OpKind::scatter;
  spec.root = int(options.rootRank);
  spec.outputs = {memory.output(output)};
  if (spec.root == rank_) {
    expect_count(inputs.size(), 1, "scatter: input lists");
    expect_count(inputs[0].size(), size_, "scatter");
    for (const at::Tensor& input : inputs[0]) {
      if (input.numel() != output.numel()) {
        C10_THROW_ERROR(ValueError, "scatter: the tensors must all be of one size");
      }
      spec.inputs.push_back(memory.input(input));
    }
  } else if (!inputs.empty() && !inputs[0].empty()) {
    C10_THROW_ERROR(ValueError, "scatter: only the root has inputs");
  }
  return submit(std::move(spec), std::move(memory), OpType::SCATTER, outputs, options.timeout,
                options.asyncOp);
}

WorkPtr CoreBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                   std::vector<int64_t>& output_sizes,
                                   std::vector<int64_t>& input_sizes,
                                   const c10d::AllToAllOptions& options) {
  Tensors memory("all_to_all_single");
  OpSpec spec;
  spec.kind = OpKind::all_to_all;
  const ConstSpan in = memory.input(input);
  const Span out = memory.output(output);
  // Bytes of each rank's rows; no sizes: equal parts.
  const auto parts = [&](const at::Tensor& tensor, const std::vector<int64_t>& sizes) {
    std::vector<size_t> bytes;
    const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
    if (sizes.empty()) {
      if (rows % size_ != 0) {
        C10_THROW_ERROR(ValueError, "all_to_all_single: " + std::to_string(rows) +
                                        " rows cannot be cut into " + std::to_string(size_) +
                                        " equal parts");
      }
      bytes.assign(size_t(size_), tensor.nbytes() / size_t(size_));
      return bytes;
    }
    expect_count(sizes.size(), size_, "all_to_all_single: split sizes");
    int64_t total = 0;
    for (int64_t size : sizes) {
      if (size < 0) {
        C10_THROW_ERROR(ValueError,
                        "all_to_all_single: a split size is negative: " + std::to_string(size));
      }
      total += size;
      bytes.push_back(rows == 0 ? 0 : tensor.nbytes() / size_t(rows) * size_t(size));
    }
    if (total != rows) {
      C10_THROW_ERROR(ValueError, "all_to_all_single: the split sizes add up to " +
                                      std::to_string(total) + ", not to the " +
                                      std::to_string(rows) + " rows");
    }
    return bytes;
  };
  size_t at = 0;
  for (size_t bytes : parts(input, input_sizes)) {
    spec.inputs.emplace_back(in.data + at, bytes);
    at += bytes;
  }
  at = 0;
  for (size_t bytes : parts(output, output_sizes)) {
    spec.outputs.push_back({out.data + at, bytes});
    at += bytes;
  }
  return submit(std::move(spec), std::move(memory), OpType::ALLTOALL_BASE, {output},
                options.timeout, options.asyncOp);
}

WorkPtr CoreBackend::alltoall(TensorList& outputs, TensorList& inputs,
                              const c10d::AllToAllOptions& options) {
  expect_count(outputs.size(), size_, "all_to_all");
  expect_count(inputs.size(), size_, "all_to_all");
  Tensors memory("all_to_all");
  OpSpec spec;
  spec.kind = OpKind::all_to_all;
  for (const at::Tensor& input : inputs) spec.inputs.push_back(memory.input(input));
  for (const at::Tensor& output : outputs) spec.outputs.push_back(memory.output(output));
  return submit(std::move(spec), std::move(memory), OpType::ALLTOALL, outputs, options.timeout,
                options.asyncOp);
}

WorkPtr CoreBackend::send(TensorList& tensors, int peer, int tag) {
  const at::Tensor& tensor = only(tensors, "send");
  Tensors memory("send");
  OpSpec spec;
  spec.kind = OpKind::send;
  spec.peer = peer;
  spec.tag = uint64_t(tag);
  spec.inputs = {memory.input(tensor)};
  return submit(std::move(spec), std::move(memory), OpType::SEND, tensors, Milliseconds(0), true);
}

WorkPtr CoreBackend::recv(TensorList& tensors, int peer, int tag) {
  const at::Tensor& tensor = only(tensors, "recv");
  Tensors memory("recv");
  OpSpec spec;
  spec.kind = OpKind::recv;
  spec.peer = peer;
  spec.tag = uint64_t(tag);
  spec.outputs = {memory.output(tensor)};
  return submit(std::move(spec), std::move(memory), OpType::RECV, tensors, Milliseconds(0), true);
}

WorkPtr CoreBackend::recvAnysource(TensorList& tensors, int tag) {
  const at::Tensor& tensor = only(tensors, "recv");
  Tensors memory("recv");
  OpSpec spec;
  spec.kind = OpKind::recv;
  spec.peer = -1;
  spec.tag = uint64_t(tag);
  spec.outputs = {memory.output(tensor)};
  return submit(std::move(spec), std::move(memory), OpType::RECVANYSOURCE, tensors, Milliseconds(0),
                true);
}

}  // namespace comm_core
