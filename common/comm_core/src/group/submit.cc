// Submission: which requests a group accepts, and in which order it numbers them.
#include "base/clock.h"
#include "group/group.h"
#include "reduce/kernels.h"

namespace comm_core {

namespace {

// Callbacks that this thread runs.
struct Current {
  const Group* group = nullptr;  // null: none, or callbacks whose operations have no order
  uint64_t number = CallbackOrder::kProgram;
  int depth = 0;
};
thread_local Current current;

}  // namespace

InCallbacks::InCallbacks(const Op& op, bool ordered)
    : group_(current.group), number_(current.number), depth_(current.depth) {
  current = {ordered ? &op.group() : nullptr, ordered ? op.number() : CallbackOrder::kProgram,
             op.depth() + 1};
}

InCallbacks::~InCallbacks() { current = {group_, number_, depth_}; }

OpPtr Group::submit(OpSpec spec) {
  engine_->check_process();
  if (closed_) throw AbortedError("group " + name_ + " was destroyed");
  check(spec);
  engine_->bury();
  auto op = std::make_shared<Op>(std::move(spec), engine_.get(), shared_from_this());
  // The order of the numbers and of the queue must be the same when several threads submit.
  std::lock_guard<std::mutex> lock(submit_mutex_);
  op->number_ = ++last_number_;
  op->context_ = current.group == this ? current.number : CallbackOrder::kProgram;
  op->depth_ = current.depth;
  const double timeout_s = op->spec_.timeout_s > 0 ? op->spec_.timeout_s : timeout_s_.load();
  if (!point_to_point(op->spec_.kind) &&
      order_.keep(op->number_, op->context_, op, op->times_.enqueued_s + timeout_s)) {
    kept_until_s_ = order_.deadline_s();
    engine_->run_soon([] {});  // for the new deadline
    return op;
  }
  start(op);
  return op;
}

void Group::start(const OpPtr& op) {
  if (!point_to_point(op->spec_.kind)) op->sequence_ = next_sequence_++;
  op->flight_.note(*op);
  engine_->submit(op);
}

void Group::start_kept(const std::vector<OpPtr>& ops) {
  kept_until_s_ = order_.deadline_s();
  for (const OpPtr& op : ops) {
    op->spec_.wake = true;  // a thread may be waiting for it already
    start(op);
  }
}

void Group::callbacks_to_come(const Op& op) {
  std::lock_guard<std::mutex> lock(submit_mutex_);
  order_.open(op.number_, op.context_);
}

void Group::callbacks_over(const Op& op) {
  std::lock_guard<std::mutex> lock(submit_mutex_);
  start_kept(order_.close(op.number_));
}

void Group::keep_none() {
  std::lock_guard<std::mutex> lock(submit_mutex_);
  start_kept(order_.end());
}

void Group::check(const OpSpec& spec) const {
  const std::string what = comm_core::name(spec.kind);
  if (reduces(spec.kind) && !supports(spec.dtype, spec.op)) {
    throw InvalidRequestError(what + ": unsupported reduction: " + comm_core::name(spec.op) +
                              " of " + comm_core::name(spec.dtype));
  }
  if (spec.root < 0 || spec.root >= size_) {
    throw InvalidRequestError(what + ": root " + std::to_string(spec.root) +
                              " is not a rank of a group of " + std::to_string(size_));
  }
  if (point_to_point(spec.kind)) {
    const bool any = spec.kind == OpKind::recv && spec.peer == -1;
    if (!any && (spec.peer < 0 || spec.peer >= size_)) {
      throw InvalidRequestError(what + ": peer " + std::to_string(spec.peer) +
                                " is not a rank of a group of " + std::to_string(size_));
    }
    if (spec.peer == rank_ && (spec.kind == OpKind::send || spec.kind == OpKind::recv)) {
      throw InvalidRequestError(what + ": a rank cannot send to itself");
    }
  }
  // Number and sizes of the blocks on this rank, as the comment of OpSpec lists them.
  const bool is_root = spec.root == rank_;
  const size_t n = size_t(size_), ins = spec.inputs.size(), outs = spec.outputs.size();
  bool fits = true;
  switch (spec.kind) {
    case OpKind::all_reduce:
      fits = ins == 1 && outs == 1 && spec.inputs[0].bytes == spec.outputs[0].bytes;
      break;
    case OpKind::reduce_scatter:
      fits = ins == n && outs == 1 && spec.inputs[size_t(rank_)].bytes == spec.outputs[0].bytes;
      break;
    case OpKind::all_gather:
      fits = ins == 1 && outs == n && spec.outputs[size_t(rank_)].bytes == spec.inputs[0].bytes;
      break;
    case OpKind::broadcast: fits = outs == 1; break;
    case OpKind::reduce: fits = ins == 1 && (!is_root || (outs == 1 && outs == ins)); break;
    case OpKind::gather: fits = ins == 1 && (!is_root || outs == n); break;
    case OpKind::scatter: fits = outs == 1 && (!is_root || ins == n); break;
    case OpKind::all_to_all: fits = ins == n && outs == n; break;
    case OpKind::send:
    case OpKind::put:
    case OpKind::accumulate: fits = ins == 1; break;
    case OpKind::recv:
    case OpKind::get: fits = outs == 1; break;
    default: break;
  }
  if (!fits) {
    throw InvalidRequestError(what + ": the number or sizes of the blocks do not fit a group of " +
                              std::to_string(size_));
  }
}

uint64_t Group::total_bytes(const OpSpec& spec) const {
  switch (spec.kind) {
    case OpKind::all_reduce:
    case OpKind::reduce:
    case OpKind::reduce_scatter:
    case OpKind::all_to_all:
    case OpKind::send:
    case OpKind::put:
    case OpKind::accumulate: return total(spec.inputs);
    case OpKind::all_gather:
    case OpKind::broadcast:
    case OpKind::recv:
    case OpKind::get: return total(spec.outputs);
    case OpKind::gather: return spec.inputs[0].bytes * uint64_t(size_);
    case OpKind::scatter: return spec.outputs[0].bytes * uint64_t(size_);
    default: return 0;
  }
}

}  // namespace comm_core
