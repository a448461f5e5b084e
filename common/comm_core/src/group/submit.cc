// Submission: which requests a group accepts, and in which order it numbers them.
#include "base/clock.h"
#include "group/group.h"
#include "reduce/kernels.h"

namespace comm_core {

namespace {

// Callbacks that this thread runs.
struct Current {
  const OpQueue* group = nullptr;  // null: none, or callbacks whose operations have no order
  uint64_t number = CallbackOrder::kProgram;
  int depth = 0;
};
thread_local Current current;

// All queues that programs submit to are groups.
Group& group_of(const Op& op) { return static_cast<Group&>(op.queue()); }

}  // namespace

InCallbacks::InCallbacks(const Op& op, bool ordered)
    : group_(current.group), number_(current.number), depth_(current.depth) {
  current = {ordered ? &op.queue() : nullptr, ordered ? op.number() : CallbackOrder::kProgram,
             op.depth() + 1};
}

InCallbacks::~InCallbacks() { current = {group_, number_, depth_}; }

OpPtr Group::submit(OpSpec spec) {
  engine_->check_process();
  if (closed_) throw AbortedError("group " + name() + " was destroyed");
  check(spec);
  engine_->bury();
  auto op = std::make_shared<Op>(std::move(spec), engine_.get(), shared_from_this());
  // The order of the numbers and of the queue must be the same when several threads submit.
  std::lock_guard<std::mutex> lock(submit_mutex_);
  OpState& state = op->state();
  state.number = ++last_number_;
  state.context = current.group == this ? current.number : CallbackOrder::kProgram;
  state.depth = current.depth;
  const double timeout_s = op->spec().timeout_s > 0 ? op->spec().timeout_s : timeout_s_.load();
  if (!point_to_point(op->spec().kind) &&
      order_.keep(state.number, state.context, op, op->times().enqueued_s + timeout_s)) {
    kept_until_s_ = order_.deadline_s();
    engine_->run_soon([] {});  // for the new deadline
    return op;
  }
  start(op, op->spec().wake);
  return op;
}

void Group::start(const OpPtr& op, bool wake) {
  if (!point_to_point(op->spec().kind)) op->state().sequence = next_sequence_++;
  engine_->submit(op, wake);
}

void Group::start_kept(const std::vector<OpPtr>& ops) {
  kept_until_s_ = order_.deadline_s();
  for (const OpPtr& op : ops) start(op, true);  // a thread may be waiting for it already
}

void Group::callbacks_to_come(const Op& op) {
  Group& group = group_of(op);
  std::lock_guard<std::mutex> lock(group.submit_mutex_);
  group.order_.open(op.number(), op.state().context);
}

void Group::callbacks_over(const Op& op) {
  Group& group = group_of(op);
  std::lock_guard<std::mutex> lock(group.submit_mutex_);
  group.start_kept(group.order_.close(op.number()));
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
  if (spec.root < 0 || spec.root >= size()) {
    throw InvalidRequestError(what + ": root " + std::to_string(spec.root) +
                              " is not a rank of a group of " + std::to_string(size()));
  }
  if (point_to_point(spec.kind)) {
    const bool any = spec.kind == OpKind::recv && spec.peer == -1;
    if (!any && (spec.peer < 0 || spec.peer >= size())) {
      throw InvalidRequestError(what + ": peer " + std::to_string(spec.peer) +
                                " is not a rank of a group of " + std::to_string(size()));
    }
    if (spec.peer == rank() && (spec.kind == OpKind::send || spec.kind == OpKind::recv)) {
      throw InvalidRequestError(what + ": a rank cannot send to itself");
    }
  }
  // Number and sizes of the blocks on this rank, as the comment of OpSpec lists them.
  const bool is_root = spec.root == rank();
  const size_t n = size_t(size()), ins = spec.inputs.size(), outs = spec.outputs.size();
  bool fits = true;
  switch (spec.kind) {
    case OpKind::all_reduce:
      fits = ins == 1 && outs == 1 && spec.inputs[0].bytes == spec.outputs[0].bytes;
      break;
    case OpKind::reduce_scatter:
      fits = ins == n && outs == 1 && spec.inputs[size_t(rank())].bytes == spec.outputs[0].bytes;
      break;
    case OpKind::all_gather:
      fits = ins == 1 && outs == n && spec.outputs[size_t(rank())].bytes == spec.inputs[0].bytes;
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
                              std::to_string(size()));
  }
}

}  // namespace comm_core
