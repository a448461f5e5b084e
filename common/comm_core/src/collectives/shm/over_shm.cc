#include <algorithm>

#include "collectives/collectives.h"
#include "collectives/shm/stages.h"
#include "reduce/kernels.h"

namespace comm_core {
namespace {

// Reading in place costs an extra exchange, in which ranks ask whether all buffers are shared. For
// an all_reduce it pays off only from this multiple of Options::shm_direct, for other operations
// from shm_direct.
constexpr size_t kAllReduceAsks = 8;

// Bytes of the L2 cache that the pieces of all ranks may occupy while they are reduced.
constexpr size_t kInCache = 256 << 10;

// Returns the blocks as one span, or an empty span if they are not adjacent in memory.
ConstSpan one_piece(const std::vector<ConstSpan>& blocks) {
  ConstSpan whole = blocks[0];
  for (size_t i = 1; i < blocks.size(); ++i) {
    if (blocks[i].data != whole.data + whole.bytes) return {};
    whole.bytes += blocks[i].bytes;
  }
  return whole;
}

Stages one(std::unique_ptr<Stage> stage) {
  Stages stages;
  stages.push_back(std::move(stage));
  return stages;
}

// Planner for ranks that are all on one host.
class OverShm : Planner {
 public:
  OverShm(const GroupView& group, const OpSpec& spec, const FrameHeader& frame)
      : Planner(group, spec, frame),
        n_(size_t(group.size())),
        me_(size_t(group.rank)),
        slot_(group.local->streams.slot_bytes()) {
    frame_.way = Way::staged;
  }

  Stages build() {
    switch (spec_.kind) {
      case OpKind::all_reduce: all_reduce(); break;
      case OpKind::reduce_scatter:
      case OpKind::reduce: reduce(); break;
      case OpKind::all_gather: all_gather(); break;
      default: exchange();
    }
    return std::move(stages_);
  }

 private:
  // Returns the addresses at `offset` bytes in the inputs of all ranks.
  static std::vector<const void*> at(const std::vector<char*>& inputs, size_t offset) {
    std::vector<const void*> sources;
    for (const char* input : inputs) sources.push_back(input + offset);
    return sources;
  }

  // Reads shared buffers in place only if the operation is in place: every rank reduces its share
  // of all buffers and writes it, while it is in the cache, into all of them.
  void all_reduce() {
    const ConstSpan in = spec_.inputs[0];
    const Span out = spec_.outputs[0];
    const ShmAllReducePlan staged{in, out, divisor_, in.bytes <= group_.options.shm_flat};
    if (staged.flat) frame_.way = Way::flat;
    if (frame_.total_bytes < kAllReduceAsks * group_.options.shm_direct) {
      return add(shm_all_reduce(*group_.local, frame_, staged));
    }
    const Span share = cuts(out, spec_.dtype, int(n_))[me_];
    frame_.way = Way::in_place;
    ShmDirectPlan plan;
    if (in.data == out.data) plan.input = in;
    plan.total = share.bytes;
    plan.chunk = std::max<size_t>(4 << 10, kInCache / n_ / 4096 * 4096);
    plan.work = [frame = frame_, divisor = divisor_, me = me_,
                 first = size_t(share.data - out.data)](const std::vector<char*>& inputs,
                                                        size_t begin, size_t end) {
      char* folded = inputs[me] + first + begin;
      fold(frame, divisor, folded, at(inputs, first + begin).data(), int(inputs.size()),
           end - begin);
      for (size_t k = 1; k < inputs.size(); ++k) {
        copy(inputs[(me + k) % inputs.size()] + first + begin, folded, end - begin);
      }
    };
    plan.otherwise = [&local = *group_.local, frame = frame_, staged] {
      return one(shm_all_reduce(local, frame, staged));
    };
    add(shm_direct(*group_.local, frame_, std::move(plan)));
  }

  void reduce() {
    ShmReducePlan staged;
    staged.divisor = divisor_;
    if (spec_.kind == OpKind::reduce) {
      const size_t root = size_t(spec_.root);
      staged.inputs.resize(n_);
      staged.inputs[root] = spec_.inputs[0];
      if (me_ == root) staged.output = spec_.outputs[0];
    } else {
      staged.inputs = spec_.inputs;
      staged.output = spec_.outputs[0];
    }
    const Span output = staged.output;
    // With more than two sources, loads are the bottleneck and streaming stores do not help.
    const bool streaming = n_ == 2 && output.bytes >= group_.options.shm_stream;
    staged.streaming = streaming;
    // Only its owner knows whether an input is a shared buffer. Small operations do not ask.
    if (spec_.kind == OpKind::reduce || frame_.total_bytes < group_.options.shm_direct) {
      return add(shm_reduce(*group_.local, frame_, std::move(staged)));
    }
    frame_.way = Way::in_place;
    ShmDirectPlan plan;
    plan.input = one_piece(spec_.inputs);
    plan.total = output.bytes;
    plan.work = [frame = frame_, divisor = divisor_, output, streaming,
                 first = size_t(spec_.inputs[me_].data - spec_.inputs[0].data)](
                    const std::vector<char*>& inputs, size_t begin, size_t end) {
      fold(frame, divisor, output.data + begin, at(inputs, first + begin).data(),
           int(inputs.size()), end - begin, streaming);
    };
    plan.otherwise = [&local = *group_.local, frame = frame_, staged = std::move(staged)] {
      return one(shm_reduce(local, frame, staged));
    };
    add(shm_direct(*group_.local, frame_, std::move(plan)));
  }

  void all_gather() {
    const std::vector<Span>& blocks = spec_.outputs;
    ShmCopyPlan staged = copy_plan();
    staged.outgoing[0] = spec_.inputs[0];
    staged.incoming = blocks;
    size_t received = 0, longest = 0;
    for (size_t r = 0; r < n_; ++r) {
      staged.rounds[r] = rounds_for(blocks[r].bytes, slot_);
      received += blocks[r].bytes;
      longest = std::max(longest, blocks[r].bytes);
    }
    staged.streaming = received >= group_.options.shm_stream;
    if (frame_.total_bytes < group_.options.shm_direct) {
      add(own_copy(spec_.inputs[0], blocks[me_]));
      return add(shm_copy(*group_.local, frame_, std::move(staged)));
    }
    frame_.way = Way::in_place;
    ShmDirectPlan plan;
    plan.input = spec_.inputs[0];
    plan.total = longest;
    plan.chunk = std::max<size_t>(16 << 10, plan.chunk / n_ / 4096 * 4096);
    plan.work = [blocks, me = me_, streaming = staged.streaming](const std::vector<char*>& inputs,
                                                                 size_t begin, size_t end) {
      for (size_t k = 0; k < blocks.size(); ++k) {
        // Begins with this rank, so that not all ranks read the same memory at the same time.
        const size_t r = (me + k) % blocks.size();
        const size_t to = std::min(end, blocks[r].bytes);
        if (begin < to && blocks[r].data != inputs[r]) {
          copy(blocks[r].data + begin, inputs[r] + begin, to - begin, streaming);
        }
      }
    };
    plan.otherwise = [&local = *group_.local, frame = frame_, from = plan.input, to = blocks[me_],
                      staged = std::move(staged)] {
      Stages stages = one(own_copy(from, to));
      stages.push_back(shm_copy(local, frame, staged));
      return stages;
    };
    add(shm_direct(*group_.local, frame_, std::move(plan)));
  }

  ShmCopyPlan copy_plan() const {
    ShmCopyPlan plan;
    plan.outgoing.resize(n_);
    plan.incoming.resize(n_);
    plan.rounds.resize(n_);
    plan.listens.assign(n_, true);
    plan.portion = slot_;
    return plan;
  }

  // Plans the operations that only move blocks.
  void exchange() {
    ShmCopyPlan plan = copy_plan();
    const size_t root = size_t(spec_.root);
    const bool is_root = me_ == root;
    if (spec_.kind == OpKind::scatter || spec_.kind == OpKind::all_to_all) {
      plan.portion = shared_portion(group_.local->streams);
    }
    switch (spec_.kind) {
      case OpKind::broadcast:
      case OpKind::scatter:
        plan.multicast = spec_.kind == OpKind::broadcast;
        plan.incoming[root] = spec_.outputs[0];
        plan.rounds[root] = rounds_for(spec_.outputs[0].bytes, plan.portion);
        for (size_t r = 0; r < n_; ++r) plan.listens[r] = r == root;
        if (plan.multicast) {
          plan.outgoing[0] = spec_.outputs[0];
        } else if (is_root) {
          plan.outgoing = spec_.inputs;
          add(own_copy(spec_.inputs[me_], spec_.outputs[0]));
        }
        break;
      case OpKind::gather:
        plan.multicast = false;
        plan.outgoing[root] = spec_.inputs[0];
        plan.rounds.assign(n_, rounds_for(spec_.inputs[0].bytes, slot_));
        plan.rounds[root] = 0;
        plan.listens.assign(n_, is_root);
        if (is_root) {
          plan.incoming = spec_.outputs;
          add(own_copy(spec_.inputs[0], spec_.outputs[me_]));
        }
        break;
      case OpKind::all_to_all:
        plan.multicast = false;
        plan.outgoing = spec_.inputs;
        plan.incoming = spec_.outputs;
        plan.rounds.assign(n_, ShmCopyPlan::kUntilLast);
        add(own_copy(spec_.inputs[me_], spec_.outputs[me_]));
        break;
      case OpKind::barrier: plan.rounds.assign(n_, 1); break;
      default: throw InvalidRequestError(std::string(name(spec_.kind)) + " is not a collective");
    }
    add(shm_copy(*group_.local, frame_, std::move(plan)));
  }

  const size_t n_, me_, slot_;
};

}  // namespace

Stages over_shm(const GroupView& group, const OpSpec& spec, const FrameHeader& frame) {
  return OverShm(group, spec, frame).build();
}

}  // namespace comm_core
