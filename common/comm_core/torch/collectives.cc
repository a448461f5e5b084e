// The collectives that every rank gives and gets the same in.
#include "arguments.h"

namespace comm_core {

using c10d::OpType;

ReduceOp op_of(const c10d::ReduceOp& op, const std::string& what) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return ReduceOp::sum;
    case c10d::ReduceOp::AVG: return ReduceOp::avg;
    case c10d::ReduceOp::PRODUCT: return ReduceOp::product;
    case c10d::ReduceOp::MIN: return ReduceOp::min;
    case c10d::ReduceOp::MAX: return ReduceOp::max;
    case c10d::ReduceOp::BAND: return ReduceOp::band;
    case c10d::ReduceOp::BOR: return ReduceOp::bor;
    case c10d::ReduceOp::BXOR: return ReduceOp::bxor;
    default: C10_THROW_ERROR(ValueError, what + ": comm_core has no such reduction");
  }
}

WorkPtr CoreBackend::broadcast(TensorList& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only(tensors, "broadcast");
  Tensors memory("broadcast");
  OpSpec spec;
  spec.kind = OpKind::broadcast;
  spec.root = int(options.rootRank);
  spec.outputs = {memory.output(tensor, spec.root == rank_)};
  return submit(std::move(spec), std::move(memory), OpType::BROADCAST, tensors, options.timeout,
                options.asyncOp);
}

WorkPtr CoreBackend::allreduce(TensorList& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  Tensors memory("all_reduce");
  OpSpec spec;
  spec.kind = OpKind::all_reduce;
  spec.op = op_of(options.reduceOp, "all_reduce");
  spec.outputs = {memory.output(tensor, true)};
  spec.inputs = {spec.outputs[0]};
  return submit(std::move(spec), std::move(memory), OpType::ALLREDUCE, tensors, options.timeout,
                options.asyncOp);
}

WorkPtr CoreBackend::allreduce_coalesced(TensorList& tensors,
                                         const c10d::AllreduceCoalescedOptions& options) {
  const Parts parts;
  std::vector<WorkPtr> works;
  for (at::Tensor& tensor : tensors) {
    TensorList one{tensor};
    works.push_back(allreduce(one, options));
  }
  return together(std::move(works), "all_reduce", tensors, OpType::ALLREDUCE_COALESCED, tensors);
}

WorkPtr CoreBackend::reduce(TensorList& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "reduce");
  Tensors memory("reduce");
  OpSpec spec;
  spec.kind = OpKind::reduce;
  spec.op = op_of(options.reduceOp, "reduce");
  spec.root = int(options.rootRank);
  if (spec.root == rank_) {
    spec.outputs = {memory.output(tensor, true)};
    spec.inputs = {spec.outputs[0]};
  } else {
    spec.inputs = {memory.input(tensor)};
  }
  return submit(std::move(spec), std::move(memory), OpType::REDUCE, tensors, options.timeout,
                options.asyncOp);
}

WorkPtr CoreBackend::allgather(TensorLists& outputs, TensorList& inputs,
                               const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only(inputs, "all_gather");
  expect_count(outputs.size(), 1, "all_gather: output lists");
  expect_count(outputs[0].size(), size_, "all_gather");
  Tensors memory("all_gather");
  OpSpec spec;
  spec.kind = OpKind::all_gather;
  spec.inputs = {memory.input(input)};
  for (const at::Tensor& output : outputs[0]) spec.outputs.push_back(memory.output(output));
  return submit(std::move(spec), std::move(memory), OpType::ALLGATHER, outputs[0], options.timeout,
                options.asyncOp);
}

WorkPtr CoreBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& options) {
  expect_times(output, input, size_, "all_gather_into_tensor");
  Tensors memory("all_gather_into_tensor");
  OpSpec spec;
  spec.kind = OpKind::all_gather;
  spec.inputs = {memory.input(input)};
  spec.outputs = memory.output_blocks(output, size_);
  return submit(std::move(spec), std::move(memory), OpType::_ALLGATHER_BASE, {output},
                options.timeout, options.asyncOp);
}

WorkPtr CoreBackend::allgather_coalesced(TensorLists& outputs, TensorList& inputs,
                                         const c10d::AllgatherOptions& options) {
  expect_count(outputs.size(), size_, "all_gather_coalesced: output lists");
  const Parts parts;
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    TensorLists gathered(1);
    for (TensorList& of_rank : outputs) {
      expect_count(of_rank.size(), int(inputs.size()), "all_gather_coalesced");
      gathered[0].push_back(of_rank[i]);
    }
    TensorList one{inputs[i]};
    works.push_back(allgather(gathered, one, options));
  }
  TensorList all;
  for (const TensorList& of_rank : outputs) all.insert(all.end(), of_rank.begin(), of_rank.end());
  return together(std::move(works), "all_gather", inputs, OpType::ALLGATHER_COALESCED,
                  std::move(all));
}

WorkPtr CoreBackend::allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                     const c10d::AllgatherOptions& options) {
  expect_count(outputs.size(), int(inputs.size()), "all_gather_into_tensor_coalesced");
  const Parts parts;
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    works.push_back(_allgather_base(outputs[i], inputs[i], options));
  }
  return together(std::move(works), "all_gather", inputs, OpType::COALESCED, outputs);
}

WorkPtr CoreBackend::reduce_scatter(TensorList& outputs, TensorLists& inputs,
                                    const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only(outputs, "reduce_scatter");
  expect_count(inputs.size(), 1, "reduce_scatter: input lists");
  expect_count(inputs[0].size(), size_, "reduce_scatter");
  Tensors memory("reduce_scatter");
  OpSpec spec;
  spec.kind = OpKind::reduce_scatter;
  spec.op = op_of(options.reduceOp, "reduce_scatter");
  for (const at::Tensor& input : inputs[0]) spec.inputs.push_back(memory.input(input));
  spec.outputs = {memory.output(output)};
  return submit(std::move(spec), std::move(memory), OpType::REDUCE_SCATTER, outputs,
                options.timeout, options.asyncOp);
}

WorkPtr CoreBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& options) {
  expect_times(input, output, size_, "reduce_scatter_tensor");
  Tensors memory("reduce_scatter_tensor");
  OpSpec spec;
  spec.kind = OpKind::reduce_scatter;
  spec.op = op_of(options.reduceOp, "reduce_scatter_tensor");
  spec.inputs = memory.input_blocks(input, size_);
  spec.outputs = {memory.output(output)};
  return submit(std::move(spec), std::move(memory), OpType::_REDUCE_SCATTER_BASE, {output},
                options.timeout, options.asyncOp);
}

WorkPtr CoreBackend::reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  expect_count(outputs.size(), int(inputs.size()), "reduce_scatter_tensor_coalesced");
  const Parts parts;
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    works.push_back(_reduce_scatter_base(outputs[i], inputs[i], options));
  }
  return together(std::move(works), "reduce_scatter", inputs,
                  OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs);
}

}  // namespace comm_core
