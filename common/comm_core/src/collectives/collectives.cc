#include "collectives/collectives.h"

#include <algorithm>

#include "collectives/shm/stages.h"
#include "reduce/kernels.h"

namespace comm_core {
namespace {

// Planner for H hosts with L ranks each. Every local rank has its own ring through the hosts, so
// all connections of a host carry equal shares. Together they send as many bytes as one rank per
// host would.
class TwoLevels : Planner {
 public:
  TwoLevels(const GroupView& group, const OpSpec& spec, const FrameHeader& frame)
      : Planner(group, spec, frame),
        hosts_(group.topology.hosts),
        me_(size_t(group.topology.local_rank[size_t(group.rank)])) {
    frame_.way = Way::two_levels;
    ring_.place = group.topology.host_of[size_t(group.rank)];
    for (const auto& ranks : hosts_) ring_.ranks.push_back(ranks[me_]);
  }

  Stages build() {
    if (spec_.kind == OpKind::all_reduce) all_reduce();
    if (spec_.kind == OpKind::reduce_scatter) reduce_scatter();
    if (spec_.kind == OpKind::all_gather) all_gather();
    return std::move(stages_);
  }

 private:
  void local_reduce(std::vector<ConstSpan> inputs, Span output) {
    ShmReducePlan plan;
    plan.inputs = std::move(inputs);
    plan.output = output;
    plan.divisor = divides_first_ ? divisor_ : 0;
    add(shm_reduce(*group_.local, next_frame(), std::move(plan)));
  }

  void local_gather(const std::vector<Span>& blocks) {
    ShmCopyPlan plan;
    plan.outgoing.assign(1, blocks[me_]);
    plan.incoming = blocks;
    plan.portion = group_.local->streams.slot_bytes();
    plan.listens.assign(blocks.size(), true);
    for (const Span& block : blocks) plan.rounds.push_back(rounds_for(block.bytes, plan.portion));
    add(shm_copy(*group_.local, next_frame(), std::move(plan)));
  }

  void all_reduce() {
    const int ranks = group_.local->streams.size();
    const std::vector<Span> shares = cuts(spec_.outputs[0], spec_.dtype, ranks);
    const Span mine = shares[me_];
    local_reduce(cuts(spec_.inputs[0], spec_.dtype, ranks), mine);
    const std::vector<Span> blocks = cuts(mine, spec_.dtype, ring_.size());
    add_ring_reduce(ring_, {blocks.begin(), blocks.end()}, blocks[size_t(ring_.place)],
                    divides_first_ ? 0 : divisor_);
    add_ring_gather(ring_, blocks);
    local_gather(shares);
  }

  void reduce_scatter() {
    size_t bytes = 0;
    for (int rank : ring_.ranks) bytes += spec_.inputs[size_t(rank)].bytes;
    auto partial = scratch(bytes);
    std::vector<ConstSpan> partials;
    char* next = partial->data();
    for (const auto& ranks : hosts_) {
      std::vector<ConstSpan> inputs;
      for (int rank : ranks) inputs.push_back(spec_.inputs[size_t(rank)]);
      const Span mine{next, inputs[me_].bytes};
      next += mine.bytes;
      partials.push_back(mine);
      local_reduce(std::move(inputs), mine);
    }
    add_ring_reduce(ring_, std::move(partials), spec_.outputs[0], divides_first_ ? 0 : divisor_);
    add_local([partial] {});  // keeps the memory until the ring is done
  }

  void all_gather() {
    add(own_copy(spec_.inputs[0], spec_.outputs[size_t(group_.rank)]));
    std::vector<Span> blocks;
    for (int rank : ring_.ranks) blocks.push_back(spec_.outputs[size_t(rank)]);
    add_ring_gather(ring_, blocks);
    for (const auto& ranks : hosts_) {
      std::vector<Span> shares;
      for (int rank : ranks) shares.push_back(spec_.outputs[size_t(rank)]);
      local_gather(shares);
    }
  }

  const std::vector<std::vector<int>>& hosts_;
  const size_t me_;  // local rank
  Ring ring_;
};

template <typename Bytes>
std::vector<Bytes> cuts_of(const Bytes& whole, DType dtype, int n) {
  const size_t element = size_of(dtype), count = whole.bytes / element, parts = size_t(n);
  std::vector<Bytes> result;
  size_t begin = 0;
  for (size_t i = 0; i < parts; ++i) {
    const size_t bytes = (count / parts + (i < count % parts ? 1 : 0)) * element;
    result.push_back({whole.data + begin, bytes});
    begin += bytes;
  }
  return result;
}

}  // namespace

void fold(const FrameHeader& frame, int64_t divisor, char* out, const void* const* sources,
          int num_sources, size_t bytes, bool streaming) {
  const size_t count = bytes / size_of(frame.dtype);
  if (divisor > 0 && frame.dtype == DType::f16) {
    return average_f16(out, nullptr, sources, num_sources, count, divisor);
  }
  reduce(frame.dtype, frame.op, out, sources, num_sources, count, streaming);
  if (divisor > 0) divide(frame.dtype, out, count, divisor);
}

std::unique_ptr<Stage> own_copy(ConstSpan from, Span to) {
  return std::make_unique<PiecewiseStage>(from.bytes, [from, to](size_t begin, size_t end) {
    copy(to.data + begin, from.data + begin, end - begin);
  });
}

std::vector<Span> cuts(const Span& whole, DType dtype, int n) { return cuts_of(whole, dtype, n); }
std::vector<ConstSpan> cuts(const ConstSpan& whole, DType dtype, int n) {
  return cuts_of(whole, dtype, n);
}

void Planner::add_ring_gather(const Ring& ring, const std::vector<Span>& blocks) {
  std::vector<Span> incoming;
  uint64_t outgoing = 0;
  for (int back = 0; back < ring.size(); ++back) {
    if (back > 0) incoming.push_back(blocks[ring.block(back)]);
    if (back < ring.size() - 1) outgoing += blocks[ring.block(back)].bytes;
  }
  add(ring_forward(group_.lanes, ring, next_frame(), {blocks[ring.block(0)]}, incoming, outgoing));
}

Stages over_both(const GroupView& group, const OpSpec& spec, const FrameHeader& frame) {
  return TwoLevels(group, spec, frame).build();
}

Stages plan(const GroupView& group, const OpSpec& spec, const FrameHeader& frame) {
  if (group.size() == 1) {
    Stages stages;
    for (size_t i = 0; i < std::min(spec.inputs.size(), spec.outputs.size()); ++i) {
      stages.push_back(own_copy(spec.inputs[i], spec.outputs[i]));
    }
    return stages;
  }
  if (group.local != nullptr && group.topology.one_host()) return over_shm(group, spec, frame);
  const bool large = frame.total_bytes >= group.options.tcp_small;
  const bool two_levels = group.local != nullptr && group.topology.regular() && large;
  if (two_levels && (spec.kind == OpKind::all_reduce || spec.kind == OpKind::reduce_scatter ||
                     spec.kind == OpKind::all_gather)) {
    return over_both(group, spec, frame);
  }
  return over_lanes(group, spec, frame);
}

}  // namespace comm_core
