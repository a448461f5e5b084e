// What a group says about an operation: whether it makes sense, its size, its description.
#include "group.h"
#include "reduce_kernels.h"

namespace comm_core {

namespace {

template <typename Blocks>
uint64_t total(const Blocks& blocks) {
  uint64_t bytes = 0;
  for (const auto& block : blocks) bytes += block.bytes;
  return bytes;
}

}  // namespace

void Group::check(const OpSpec& spec) const {
  const std::string what = comm_core::name(spec.kind);
  const bool reduces = spec.kind == OpKind::all_reduce || spec.kind == OpKind::reduce_scatter ||
                       spec.kind == OpKind::reduce;
  if (reduces && !supports(spec.dtype, spec.op)) {
    throw InvalidRequestError(what + ": there is no " + comm_core::name(spec.op) + " of " +
                              comm_core::name(spec.dtype));
  }
  if (spec.root < 0 || spec.root >= size_) {
    throw InvalidRequestError(what + ": root " + std::to_string(spec.root) +
                              " is no rank of a group of " + std::to_string(size_));
  }
  if (point_to_point(spec.kind)) {
    const bool any = spec.kind == OpKind::recv && spec.peer == -1;
    if (!any && (spec.peer < 0 || spec.peer >= size_)) {
      throw InvalidRequestError(what + ": peer " + std::to_string(spec.peer) +
                                " is no rank of a group of " + std::to_string(size_));
    }
    if (spec.peer == rank_ && (spec.kind == OpKind::send || spec.kind == OpKind::recv)) {
      throw InvalidRequestError(what + ": a rank cannot send to itself");
    }
  }
  // How many blocks an operation has on this rank; the header of OpSpec says the same in words.
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
    case OpKind::send:
    case OpKind::put:
    case OpKind::accumulate: return total(spec.inputs);
    case OpKind::reduce_scatter:
    case OpKind::all_to_all: return total(spec.inputs);
    case OpKind::all_gather:
    case OpKind::broadcast:
    case OpKind::recv:
    case OpKind::get: return total(spec.outputs);
    case OpKind::gather: return spec.inputs[0].bytes * uint64_t(size_);
    case OpKind::scatter: return spec.outputs[0].bytes * uint64_t(size_);
    default: return 0;
  }
}

FrameHeader Group::frame(const Op& op) const {
  FrameHeader header;
  header.kind = op.spec().kind;
  header.dtype = op.spec().dtype;
  header.op = op.spec().op;
  header.root = op.spec().root;
  header.sequence = op.sequence();
  header.total_bytes = total_bytes(op.spec());
  return header;
}

std::string Group::describe(const Op& op) const {
  std::string text = comm_core::describe(frame(op));
  if (point_to_point(op.spec().kind)) {
    text += op.spec().kind == OpKind::recv || op.spec().kind == OpKind::get ? " from " : " to ";
    text += op.spec().peer < 0 ? "any rank" : "rank " + std::to_string(op.spec().peer);
  }
  return text + " on rank " + std::to_string(rank_) + " of group " + name_;
}

}  // namespace comm_core
