// The stages of every collective, over each kind of connection.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "collectives/lanes/stages.h"
#include "collectives/stage.h"
#include "group/group.h"

namespace comm_core {

// Chooses the stages of a collective by its kind, its size and who is where. All ranks of the group
// come to the same choice. Only in the engine.
Stages plan(Group& group, const OpSpec& spec, const FrameHeader& frame);

// All ranks on one host.
Stages over_shm(Group& group, const OpSpec& spec, const FrameHeader& frame);
// Every rank with lanes to every other, wherever it is.
Stages over_lanes(Group& group, const OpSpec& spec, const FrameHeader& frame);
// The same number of ranks on each host: shared memory inside, a ring of hosts for each local rank.
Stages over_both(Group& group, const OpSpec& spec, const FrameHeader& frame);

// Element-wise over `sources`, as `frame` says, then divided by `divisor` if that is > 0: in the
// end, but of f16 before anything is rounded.
void fold(const FrameHeader& frame, int64_t divisor, char* out, const void* const* sources,
          int num_sources, size_t bytes, bool streaming = false);

// A stage for the part that stays on this rank.
std::unique_ptr<Stage> own_copy(ConstSpan from, Span to);

// `whole` cut into n parts as equal as can be, of whole elements.
std::vector<Span> cuts(const Span& whole, DType dtype, int n);
std::vector<ConstSpan> cuts(const ConstSpan& whole, DType dtype, int n);

// The stages of one collective so far; those that send over TCP are numbered in their frames.
class Planner {
 protected:
  Planner(Group& group, const OpSpec& spec, const FrameHeader& frame)
      : group_(group),
        spec_(spec),
        divisor_(spec.op == ReduceOp::avg ? group.size() : 0),
        divides_first_(divisor_ > 0 && spec.dtype == DType::f16),
        frame_(frame) {}

  FrameHeader next_frame() {
    frame_.stage = uint8_t(stages_.size());
    return frame_;
  }
  void add(std::unique_ptr<Stage> stage) { stages_.push_back(std::move(stage)); }
  void add_local(std::function<void()> work) { add(std::make_unique<LocalStage>(std::move(work))); }
  // Memory for `bytes` that goes with the last stage that holds it.
  std::shared_ptr<Scratch> scratch(size_t bytes) {
    return std::make_shared<Scratch>(group_.scratch(), std::max<size_t>(bytes, 64));
  }

  // inputs[i]: this rank's contribution to the block of place i of the ring; the block of this
  // rank's place ends in `output`.
  void add_ring_reduce(const Ring& ring, std::vector<ConstSpan> inputs, Span output,
                       int64_t divisor) {
    add(ring_reduce(group_, ring, next_frame(), std::move(inputs), output, divisor));
  }
  // blocks[i]: of place i; this rank's is there.
  void add_ring_gather(const Ring& ring, const std::vector<Span>& blocks);

  Group& group_;
  const OpSpec& spec_;
  const int64_t divisor_;
  const bool divides_first_;  // what is rounded between two ranks must be an average already
  FrameHeader frame_;
  Stages stages_;
};

}  // namespace comm_core
