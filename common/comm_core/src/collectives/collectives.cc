#include "collectives/collectives.h"

#include <algorithm>

#include "collectives/shm/copy_stage.h"
#include "collectives/shm/reduce_stage.h"
#include "collectives/tcp/ring_stage.h"
#include "group/group.h"
#include "reduce/kernels.h"

namespace comm_core {
namespace {

// H hosts with L ranks each. Every local rank has a ring of its own through the hosts, so that all
// connections of a host carry an equal share of what crosses the network, which is what a single
// rank per host would send.
class TwoLevels {
 public:
  TwoLevels(Group& group, const OpSpec& spec, const FrameHeader& frame)
      : group_(group), spec_(spec), frame_(frame), hosts_(group.topology().hosts) {
    const size_t host = size_t(group.topology().host_of[size_t(group.rank())]);
    local_ = hosts_[host];
    me_ = size_t(group.topology().local_rank[size_t(group.rank())]);
    ring_.place = int(host);
    for (const auto& ranks : hosts_) ring_.ranks.push_back(ranks[me_]);
    for (int rank : local_) labels_.push_back(group.peer(rank).label);
    divisor_ = spec.op == ReduceOp::avg ? group.size() : 0;
  }

  Stages build() {
    if (spec_.kind == OpKind::all_reduce) all_reduce();
    if (spec_.kind == OpKind::reduce_scatter) reduce_scatter();
    if (spec_.kind == OpKind::all_gather) all_gather();
    return std::move(stages_);
  }

 private:
  FrameHeader next_frame() {
    frame_.stage = uint8_t(stages_.size());
    return frame_;
  }

  void local_reduce(std::vector<ConstSpan> inputs, Span output) {
    ShmReducePlan plan;
    plan.frame = next_frame();
    plan.dtype = spec_.dtype;
    plan.op = spec_.op;
    for (const ConstSpan& block : inputs) plan.bytes.push_back(block.bytes);
    plan.inputs = std::move(inputs);
    plan.output = output;
    stages_.push_back(std::make_unique<ShmReduceStage>(*group_.shm(), plan, labels_));
  }

  void local_gather(const std::vector<Span>& blocks) {
    ShmCopyPlan plan;
    plan.frame = next_frame();
    plan.outgoing.assign(1, blocks[me_]);
    plan.incoming = blocks;
    plan.portion = group_.shm()->slot_bytes();
    plan.listens.assign(blocks.size(), true);
    for (const Span& block : blocks) {
      plan.rounds.push_back(ShmCopyStage::rounds_for(block.bytes, plan.portion));
    }
    stages_.push_back(std::make_unique<ShmCopyStage>(*group_.shm(), plan, labels_));
  }

  void ring_reduce(std::vector<ConstSpan> inputs, Span output) {
    stages_.push_back(std::make_unique<RingReduceStage>(
        group_, ring_, next_frame(), spec_.dtype, spec_.op, std::move(inputs), output, divisor_));
  }

  void ring_gather(const std::vector<Span>& blocks) {
    std::vector<Span> incoming;
    uint64_t outgoing = 0;
    for (int back = 0; back < ring_.size(); ++back) {
      if (back > 0) incoming.push_back(blocks[ring_.block(back)]);
      if (back < ring_.size() - 1) outgoing += blocks[ring_.block(back)].bytes;
    }
    stages_.push_back(std::make_unique<RingForwardStage>(
        group_, ring_, next_frame(), std::vector<ConstSpan>{blocks[ring_.block(0)]}, incoming,
        outgoing));
  }

  void all_reduce() {
    const size_t element = size_of(spec_.dtype);
    const Span out = spec_.outputs[0];
    std::vector<Span> shares;
    std::vector<ConstSpan> inputs;
    for (size_t l = 0; l < local_.size(); ++l) {
      const Cut c = cut(out.bytes, element, int(local_.size()), int(l));
      shares.push_back({out.data + c.begin, c.bytes});
      inputs.push_back({spec_.inputs[0].data + c.begin, c.bytes});
    }
    const Span mine = shares[me_];
    local_reduce(std::move(inputs), mine);
    std::vector<Span> blocks;
    for (int h = 0; h < ring_.size(); ++h) {
      const Cut c = cut(mine.bytes, element, ring_.size(), h);
      blocks.push_back({mine.data + c.begin, c.bytes});
    }
    ring_reduce({blocks.begin(), blocks.end()}, blocks[size_t(ring_.place)]);
    ring_gather(blocks);
    local_gather(shares);
  }

  void reduce_scatter() {
    size_t bytes = 0;
    for (const auto& ranks : hosts_) bytes += spec_.inputs[size_t(ranks[me_])].bytes;
    auto partial = std::make_shared<Scratch>(group_.scratch(), std::max<size_t>(bytes, 64));
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
    ring_reduce(std::move(partials), spec_.outputs[0]);
    stages_.push_back(std::make_unique<LocalStage>([partial] {}));  // keeps it until here
  }

  void all_gather() {
    const Span own = spec_.outputs[size_t(group_.rank())];
    stages_.push_back(std::make_unique<LocalStage>([from = spec_.inputs[0], own] {
      if (from.data != own.data) copy(own.data, from.data, from.bytes);
    }));
    std::vector<Span> blocks;
    for (const auto& ranks : hosts_) blocks.push_back(spec_.outputs[size_t(ranks[me_])]);
    ring_gather(blocks);
    for (const auto& ranks : hosts_) {
      std::vector<Span> shares;
      for (int rank : ranks) shares.push_back(spec_.outputs[size_t(rank)]);
      local_gather(shares);
    }
  }

  Group& group_;
  const OpSpec& spec_;
  FrameHeader frame_;
  const std::vector<std::vector<int>>& hosts_;
  std::vector<int> local_;
  size_t me_;
  Ring ring_;
  std::vector<std::string> labels_;
  int64_t divisor_;
  Stages stages_;
};

}  // namespace

Stages over_both(Group& group, const OpSpec& spec, const FrameHeader& frame) {
  return TwoLevels(group, spec, frame).build();
}

Stages plan(Group& group, const OpSpec& spec, uint64_t sequence) {
  FrameHeader frame;
  frame.kind = spec.kind;
  frame.dtype = spec.dtype;
  frame.op = spec.op;
  frame.root = spec.root;
  frame.sequence = sequence;
  frame.total_bytes = group.total_bytes(spec);
  if (group.size() == 1) return alone(spec);
  if (group.shm() != nullptr && group.topology().one_host()) return over_shm(group, spec, frame);
  const bool large = frame.total_bytes >= group.options().tcp_small;
  const bool two_levels = group.shm() != nullptr && group.topology().regular() && large;
  if (two_levels && (spec.kind == OpKind::all_reduce || spec.kind == OpKind::reduce_scatter ||
                     spec.kind == OpKind::all_gather)) {
    return over_both(group, spec, frame);
  }
  return over_tcp(group, spec, frame);
}

}  // namespace comm_core
