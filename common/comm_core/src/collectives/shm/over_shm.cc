#include <algorithm>

#include "collectives/collectives.h"
#include "collectives/shm/all_reduce_stage.h"
#include "collectives/shm/copy_stage.h"
#include "collectives/shm/direct_stage.h"
#include "collectives/shm/reduce_stage.h"
#include "group/group.h"
#include "reduce/kernels.h"

namespace comm_core {

namespace {

// To ask whether all buffers are shared costs a hand-over; staging an all_reduce in place of it
// costs little more until it has so many times the bytes from which others ask.
constexpr size_t kAllReduceAsks = 8;

// What all ranks' pieces of a share take of a core's second-level cache while they are folded.
constexpr size_t kInCache = 256 << 10;

std::vector<std::string> labels(Group& group) {
  const auto& ranks =
      group.topology().hosts[size_t(group.topology().host_of[size_t(group.rank())])];
  std::vector<std::string> names;
  for (int rank : ranks) names.push_back(group.peer(rank).label);
  return names;
}

void copy_own(const ConstSpan& from, const Span& to) {
  if (from.data != to.data) copy(to.data, from.data, from.bytes);
}

// A stage for the part that stays on this rank.
std::unique_ptr<Stage> own_copy(ConstSpan from, Span to) {
  return std::make_unique<LocalStage>([from, to] { copy_own(from, to); });
}

// The blocks as one piece of memory; empty if they are not.
ConstSpan one_piece(const std::vector<ConstSpan>& blocks) {
  ConstSpan whole = blocks[0];
  for (size_t i = 1; i < blocks.size(); ++i) {
    if (blocks[i].data != whole.data + whole.bytes) return {};
    whole.bytes += blocks[i].bytes;
  }
  return whole;
}

std::unique_ptr<Stage> direct(Group& group, const FrameHeader& frame, ConstSpan input,
                              std::vector<ShmDirectStage::Pass> passes,
                              std::function<std::unique_ptr<Stage>()> otherwise) {
  ShmDirectStage::Plan plan{frame, input, std::move(passes), std::move(otherwise)};
  return std::make_unique<ShmDirectStage>(*group.shm(), group.peer_buffers(), std::move(plan),
                                          labels(group));
}

// Folds what everybody has at `first` bytes from the beginning of his input.
ShmDirectStage::Pass fold_pass(Group& group, const OpSpec& spec, size_t first, Span output,
                               bool streaming) {
  const int n = group.size();
  const int64_t divisor = spec.op == ReduceOp::avg ? n : 0;
  ShmDirectStage::Pass pass;
  pass.total = output.bytes;
  pass.work = [=, dtype = spec.dtype, op = spec.op](const std::vector<char*>& inputs, size_t begin,
                                                    size_t end) {
    std::vector<const void*> sources;
    for (const char* input : inputs) sources.push_back(input + first + begin);
    const size_t count = (end - begin) / size_of(dtype);
    reduce(dtype, op, output.data + begin, sources.data(), n, count, streaming);
    if (divisor > 0) divide(dtype, output.data + begin, count, divisor);
  };
  return pass;
}

// Copies blocks[r] from rank r, where it is offsets[r] bytes from the beginning of his input.
ShmDirectStage::Pass copy_pass(Group& group, std::vector<Span> blocks, std::vector<size_t> offsets,
                               bool streaming) {
  ShmDirectStage::Pass pass;
  for (const Span& block : blocks) pass.total = std::max(pass.total, block.bytes);
  pass.chunk = std::max<size_t>(16 << 10, pass.chunk / blocks.size() / 4096 * 4096);
  pass.work = [=, me = size_t(group.rank())](const std::vector<char*>& inputs, size_t begin,
                                             size_t end) {
    for (size_t k = 0; k < blocks.size(); ++k) {
      // Neighbours first: not everybody reads the same rank's memory at once.
      const size_t r = (me + k) % blocks.size();
      const size_t to = std::min(end, blocks[r].bytes);
      const char* from = inputs[r] + offsets[r];
      if (begin >= to || blocks[r].data == from) continue;
      copy(blocks[r].data + begin, from + begin, to - begin, streaming);
    }
  };
  return pass;
}

std::unique_ptr<Stage> direct_reduce_scatter(Group& group, const OpSpec& spec,
                                             const FrameHeader& frame, bool streaming,
                                             std::function<std::unique_ptr<Stage>()> otherwise) {
  const size_t first = size_t(spec.inputs[size_t(group.rank())].data - spec.inputs[0].data);
  return direct(group, frame, one_piece(spec.inputs),
                {fold_pass(group, spec, first, spec.outputs[0], streaming)}, std::move(otherwise));
}

std::unique_ptr<Stage> direct_all_gather(Group& group, const OpSpec& spec, const FrameHeader& frame,
                                         std::function<std::unique_ptr<Stage>()> otherwise) {
  const bool streaming = frame.total_bytes >= group.options().shm_stream;
  const std::vector<size_t> offsets(spec.outputs.size(), 0);
  return direct(group, frame, spec.inputs[0], {copy_pass(group, spec.outputs, offsets, streaming)},
                std::move(otherwise));
}

// In place only: everybody folds his share of all buffers and, while it is in his cache, writes it
// into all of them; nobody else looks at it there.
std::unique_ptr<Stage> direct_all_reduce(Group& group, const OpSpec& spec, const FrameHeader& frame,
                                         std::function<std::unique_ptr<Stage>()> otherwise) {
  const bool in_place = spec.inputs[0].data == spec.outputs[0].data;
  const int n = group.size();
  const size_t me = size_t(group.rank());
  const Cut share = cut(spec.outputs[0].bytes, size_of(spec.dtype), n, int(me));
  const int64_t divisor = spec.op == ReduceOp::avg ? n : 0;
  ShmDirectStage::Pass pass;
  pass.total = share.bytes;
  pass.chunk = std::max<size_t>(4 << 10, kInCache / size_t(n) / 4096 * 4096);
  pass.work = [=, dtype = spec.dtype, op = spec.op](const std::vector<char*>& inputs, size_t begin,
                                                    size_t end) {
    std::vector<const void*> sources;
    for (const char* input : inputs) sources.push_back(input + share.begin + begin);
    char* folded = inputs[me] + share.begin + begin;
    const size_t count = (end - begin) / size_of(dtype);
    reduce(dtype, op, folded, sources.data(), n, count, false);
    if (divisor > 0) divide(dtype, folded, count, divisor);
    for (size_t k = 1; k < inputs.size(); ++k) {
      copy(inputs[(me + k) % inputs.size()] + share.begin + begin, folded, end - begin, false);
    }
  };
  return direct(group, frame, in_place ? spec.inputs[0] : ConstSpan{}, {std::move(pass)},
                std::move(otherwise));
}

}  // namespace

Cut cut(size_t total_bytes, size_t element, int n, int i) {
  const size_t count = total_bytes / element, parts = size_t(n), at = size_t(i);
  const size_t begin = count / parts * at + std::min(at, count % parts);
  const size_t size = count / parts + (at < count % parts ? 1 : 0);
  return {begin * element, size * element};
}

Stages alone(const OpSpec& spec) {
  Stages stages;
  for (size_t i = 0; i < std::min(spec.inputs.size(), spec.outputs.size()); ++i) {
    stages.push_back(own_copy(spec.inputs[i], spec.outputs[i]));
  }
  return stages;
}

Stages over_shm(Group& group, const OpSpec& spec, const FrameHeader& frame) {
  ShmStreams& streams = *group.shm();
  const size_t n = size_t(streams.size()), me = size_t(streams.me());
  const size_t slot = streams.slot_bytes();
  const size_t share = std::max<size_t>(64, slot / std::max<size_t>(1, n - 1) / 64 * 64);
  const bool is_root = int(me) == spec.root;
  const int64_t divisor = spec.op == ReduceOp::avg ? int64_t(n) : 0;
  Stages stages;

  if (spec.kind == OpKind::all_reduce) {
    ShmAllReducePlan plan{frame,
                          spec.dtype,
                          spec.op,
                          spec.inputs[0],
                          spec.outputs[0],
                          divisor,
                          spec.inputs[0].bytes <= group.options().shm_flat};
    const auto staged = [&group, plan]() -> std::unique_ptr<Stage> {
      return std::make_unique<ShmAllReduceStage>(*group.shm(), plan, labels(group));
    };
    const bool ask = frame.total_bytes >= kAllReduceAsks * group.options().shm_direct;
    stages.push_back(ask ? direct_all_reduce(group, spec, frame, staged) : staged());
    return stages;
  }
  if (spec.kind == OpKind::reduce_scatter || spec.kind == OpKind::reduce) {
    ShmReducePlan plan;
    plan.frame = frame;
    plan.dtype = spec.dtype;
    plan.op = spec.op;
    plan.divisor = divisor;
    plan.inputs.resize(n);
    plan.bytes.resize(n);
    if (spec.kind == OpKind::reduce) {
      plan.inputs[size_t(spec.root)] = spec.inputs[0];
      plan.bytes[size_t(spec.root)] = spec.inputs[0].bytes;
      if (is_root) plan.output = spec.outputs[0];
    } else {
      plan.inputs = spec.inputs;
      for (size_t i = 0; i < n; ++i) plan.bytes[i] = spec.inputs[i].bytes;
      plan.output = spec.outputs[0];
    }
    // With more sources than two, the loads are what it waits for.
    plan.streaming = n == 2 && plan.output.bytes >= group.options().shm_stream;
    const auto staged = [&group, plan]() -> std::unique_ptr<Stage> {
      return std::make_unique<ShmReduceStage>(*group.shm(), plan, labels(group));
    };
    // Whether the inputs are shared buffers only their owners know: asked where it is worth it.
    const bool ask =
        spec.kind == OpKind::reduce_scatter && frame.total_bytes >= group.options().shm_direct;
    stages.push_back(ask ? direct_reduce_scatter(group, spec, frame, plan.streaming, staged)
                         : staged());
    return stages;
  }

  ShmCopyPlan plan;
  plan.frame = frame;
  plan.outgoing.resize(n);
  plan.incoming.resize(n);
  plan.rounds.resize(n);
  plan.listens.assign(n, true);
  plan.portion = slot;
  size_t received = 0;
  switch (spec.kind) {
    case OpKind::all_gather:
      plan.outgoing[0] = spec.inputs[0];
      plan.incoming = spec.outputs;
      for (size_t r = 0; r < n; ++r) {
        plan.rounds[r] = ShmCopyStage::rounds_for(spec.outputs[r].bytes, slot);
        received += spec.outputs[r].bytes;
      }
      stages.push_back(own_copy(spec.inputs[0], spec.outputs[me]));
      break;
    case OpKind::broadcast:
      plan.outgoing[0] = spec.outputs[0];
      plan.incoming[size_t(spec.root)] = spec.outputs[0];
      plan.rounds[size_t(spec.root)] = ShmCopyStage::rounds_for(spec.outputs[0].bytes, slot);
      for (size_t r = 0; r < n; ++r) plan.listens[r] = int(r) == spec.root;
      break;
    case OpKind::gather:
      plan.multicast = false;
      plan.outgoing[size_t(spec.root)] = spec.inputs[0];
      for (size_t r = 0; r < n; ++r) {
        plan.listens[r] = is_root;
        if (int(r) == spec.root) continue;
        plan.rounds[r] = ShmCopyStage::rounds_for(spec.inputs[0].bytes, slot);
        if (is_root) plan.incoming[r] = spec.outputs[r];
      }
      if (is_root) stages.push_back(own_copy(spec.inputs[0], spec.outputs[me]));
      break;
    case OpKind::scatter:
      plan.multicast = false;
      plan.portion = share;
      plan.incoming[size_t(spec.root)] = spec.outputs[0];
      plan.rounds[size_t(spec.root)] = ShmCopyStage::rounds_for(spec.outputs[0].bytes, share);
      for (size_t r = 0; r < n; ++r) plan.listens[r] = int(r) == spec.root;
      if (is_root) {
        plan.outgoing = spec.inputs;
        stages.push_back(own_copy(spec.inputs[me], spec.outputs[0]));
      }
      break;
    case OpKind::all_to_all:
      plan.multicast = false;
      plan.portion = share;
      plan.outgoing = spec.inputs;
      plan.incoming = spec.outputs;
      plan.rounds.assign(n, ShmCopyPlan::kUntilLast);
      stages.push_back(own_copy(spec.inputs[me], spec.outputs[me]));
      break;
    case OpKind::barrier: plan.rounds.assign(n, 1); break;
    default: throw InvalidRequestError(std::string(name(spec.kind)) + " is no collective");
  }
  plan.streaming = received >= group.options().shm_stream;
  const bool ask =
      spec.kind == OpKind::all_gather && frame.total_bytes >= group.options().shm_direct;
  if (!ask) {
    stages.push_back(std::make_unique<ShmCopyStage>(streams, plan, labels(group)));
    return stages;
  }
  stages.clear();
  const auto staged = [&group, plan, from = spec.inputs[0], to = spec.outputs[me]] {
    copy_own(from, to);
    return std::make_unique<ShmCopyStage>(*group.shm(), plan, labels(group));
  };
  stages.push_back(direct_all_gather(group, spec, frame, staged));
  return stages;
}

}  // namespace comm_core
