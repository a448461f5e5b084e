// Collectives in which every rank has inputs and outputs of the same sizes.
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
    default: C10_THROW_ERROR(ValueError, what + ": comm_core does not support this reduction");
  }
}

WorkPtr CoreBackend::broadcast(TensorList& tensors, const c10d::BroadcastOptions& options) {
  Call call("broadcast", OpKind::broadcast);
  call.spec.root = rank_of(options.rootRank, size_, "broadcast: root");
  call.spec.outputs = {call.output(only(tensors, "broadcast"), call.spec.root == rank_)};
  return submit(std::move(call), OpType::BROADCAST, tensors, options);
}

WorkPtr CoreBackend::allreduce(TensorList& tensors, const c10d::AllreduceOptions& options) {
  Call call("all_reduce", OpKind::all_reduce);
  const at::Tensor& tensor = only(tensors, "all_reduce");
  call.spec.op = op_of(options.reduceOp, "all_reduce");
  call.spec.outputs = {call.output(tensor, true)};
  call.spec.inputs = {call.spec.outputs[0]};
  return submit(std::move(call), OpType::ALLREDUCE, tensors, options);
}

void Batch::start(const at::Tensor& tensor, bool wake) {
  c10d::AllreduceOptions options;
  options.asyncOp = wake;
  TensorList tensors{tensor};
  const WithPriority guard(priority_);
  const WorkPtr work = backend_->allreduce(tensors, options);
  ops_.push_back(static_cast<CoreWork&>(*work).ops()[0]);
}

void Batch::wait() {
  if (ops_.empty()) return;
  CoreWork(backend_->getRank(), OpType::COALESCED, nullptr, {}, std::exchange(ops_, {}), {},
           nullptr)
      .wait(Milliseconds(0));
}

bool Batch::done() const {
  return std::all_of(ops_.begin(), ops_.end(), [](const OpPtr& op) { return op->ends(); });
}

WorkPtr CoreBackend::allreduce_coalesced(TensorList& tensors,
                                         const c10d::AllreduceCoalescedOptions& options) {
  const auto one = [&](size_t i) {
    TensorList tensor{tensors[i]};
    return allreduce(tensor, options);
  };
  return each(tensors.size(), one, "all_reduce", tensors, OpType::ALLREDUCE_COALESCED, tensors);
}

WorkPtr CoreBackend::reduce(TensorList& tensors, const c10d::ReduceOptions& options) {
  Call call("reduce", OpKind::reduce);
  const at::Tensor& tensor = only(tensors, "reduce");
  call.spec.op = op_of(options.reduceOp, "reduce");
  call.spec.root = rank_of(options.rootRank, size_, "reduce: root");
  if (call.spec.root == rank_) {
    call.spec.outputs = {call.output(tensor, true)};
    call.spec.inputs = {call.spec.outputs[0]};
  } else {
    call.spec.inputs = {call.input(tensor)};
  }
  return submit(std::move(call), OpType::REDUCE, tensors, options);
}

WorkPtr CoreBackend::allgather(TensorLists& outputs, TensorList& inputs,
                               const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only(inputs, "all_gather");
  expect_count(outputs.size(), 1, "all_gather: output lists");
  expect_count(outputs[0].size(), size_, "all_gather: output tensors (one per rank)");
  Call call("all_gather", OpKind::all_gather);
  call.spec.inputs = {call.input(input)};
  for (const at::Tensor& output : outputs[0]) call.spec.outputs.push_back(call.output(output));
  return submit(std::move(call), OpType::ALLGATHER, outputs[0], options);
}

WorkPtr CoreBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& options) {
  expect_times(output, input, size_, "all_gather_into_tensor");
  Call call("all_gather_into_tensor", OpKind::all_gather);
  call.spec.inputs = {call.input(input)};
  call.spec.outputs = call.output_blocks(output, size_);
  return submit(std::move(call), OpType::_ALLGATHER_BASE, {output}, options);
}

WorkPtr CoreBackend::allgather_coalesced(TensorLists& outputs, TensorList& inputs,
                                         const c10d::AllgatherOptions& options) {
  expect_count(outputs.size(), size_, "all_gather_coalesced: output lists (one per rank)");
  const auto one = [&](size_t i) {
    TensorLists gathered(1);
    for (TensorList& of_rank : outputs) {
      expect_count(of_rank.size(), int(inputs.size()), "all_gather_coalesced: tensors in a list");
      gathered[0].push_back(of_rank[i]);
    }
    TensorList input{inputs[i]};
    return allgather(gathered, input, options);
  };
  TensorList all;
  for (const TensorList& of_rank : outputs) all.insert(all.end(), of_rank.begin(), of_rank.end());
  return each(inputs.size(), one, "all_gather", inputs, OpType::ALLGATHER_COALESCED, all);
}

WorkPtr CoreBackend::allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                     const c10d::AllgatherOptions& options) {
  expect_count(outputs.size(), int(inputs.size()), "all_gather_into_tensor_coalesced: outputs");
  const auto one = [&](size_t i) { return _allgather_base(outputs[i], inputs[i], options); };
  return each(inputs.size(), one, "all_gather", inputs, OpType::COALESCED, outputs);
}

WorkPtr CoreBackend::reduce_scatter(TensorList& outputs, TensorLists& inputs,
                                    const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only(outputs, "reduce_scatter");
  expect_count(inputs.size(), 1, "reduce_scatter: input lists");
  expect_count(inputs[0].size(), size_, "reduce_scatter: input tensors (one per rank)");
  Call call("reduce_scatter", OpKind::reduce_scatter);
  call.spec.op = op_of(options.reduceOp, "reduce_scatter");
  for (const at::Tensor& input : inputs[0]) call.spec.inputs.push_back(call.input(input));
  call.spec.outputs = {call.output(output)};
  return submit(std::move(call), OpType::REDUCE_SCATTER, outputs, options);
}

WorkPtr CoreBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& options) {
  expect_times(input, output, size_, "reduce_scatter_tensor");
  Call call("reduce_scatter_tensor", OpKind::reduce_scatter);
  call.spec.op = op_of(options.reduceOp, "reduce_scatter_tensor");
  call.spec.inputs = call.input_blocks(input, size_);
  call.spec.outputs = {call.output(output)};
  return submit(std::move(call), OpType::_REDUCE_SCATTER_BASE, {output}, options);
}

WorkPtr CoreBackend::reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  expect_count(outputs.size(), int(inputs.size()), "reduce_scatter_tensor_coalesced: outputs");
  const auto one = [&](size_t i) { return _reduce_scatter_base(outputs[i], inputs[i], options); };
  return each(inputs.size(), one, "reduce_scatter", inputs, OpType::COALESCED, outputs);
}

}  // namespace comm_core
