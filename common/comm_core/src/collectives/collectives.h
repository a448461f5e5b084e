// Plans of the collectives: which stages run, over shared memory, over lanes, or over both.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "collectives/lanes/stages.h"
#include "collectives/view.h"
#include "engine/stage.h"

namespace comm_core {

// Returns the stages of a collective, chosen by its kind, its size and the topology, so that all
// ranks of the group choose the same algorithm. The stages use the memory of `spec` and must not
// outlive it or what `group` refers to. Throws InvalidRequestError if `spec` is not a collective.
Stages plan(const GroupView& group, const OpSpec& spec, const FrameHeader& frame);

// For groups whose ranks are all on one host: shared memory only.
Stages over_shm(const GroupView& group, const OpSpec& spec, const FrameHeader& frame);
// For any group: lanes between all ranks, even on one host.
Stages over_lanes(const GroupView& group, const OpSpec& spec, const FrameHeader& frame);
// For an equal number of ranks on each host: shared memory inside, and for each local rank a ring
// through the hosts.
Stages over_both(const GroupView& group, const OpSpec& spec, const FrameHeader& frame);

// Reduces `sources` element by element into `out` (`bytes` bytes), with the dtype and operation of
// `frame`. If `divisor` > 0, divides the result by it. For f16 it divides before the rounding, for
// other types after it.
void fold(const FrameHeader& frame, int64_t divisor, char* out, const void* const* sources,
          int num_sources, size_t bytes, bool streaming = false);

// Returns a stage that copies this rank's own block.
std::unique_ptr<Stage> own_copy(ConstSpan from, Span to);

// Return `whole` cut into n parts of whole elements, whose sizes differ by at most one element.
std::vector<Span> cuts(const Span& whole, DType dtype, int n);
std::vector<ConstSpan> cuts(const ConstSpan& whole, DType dtype, int n);

// Base class of the planners: builds the list of stages of one collective. The frames of stages
// that use lanes hold the number of the stage.
class Planner {
 protected:
  Planner(const GroupView& group, const OpSpec& spec, const FrameHeader& frame)
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
  // Returns temporary memory of at least `bytes` bytes. The stages that use it share its ownership.
  std::shared_ptr<Scratch> scratch(size_t bytes) {
    return std::make_shared<Scratch>(group_.scratch, std::max<size_t>(bytes, 64));
  }

  // Adds a ring reduce-scatter. inputs[i] is this rank's contribution to block i, which the rank at
  // position i of the ring gets. `output` gets the block of this rank's position.
  void add_ring_reduce(const Ring& ring, std::vector<ConstSpan> inputs, Span output,
                       int64_t divisor) {
    add(ring_reduce(group_.lanes, group_.scratch, ring, next_frame(), std::move(inputs), output,
                    divisor));
  }
  // Adds a ring all-gather. blocks[i] is the block of position i; this rank's is complete.
  void add_ring_gather(const Ring& ring, const std::vector<Span>& blocks);

  const GroupView& group_;
  const OpSpec& spec_;
  const int64_t divisor_;
  const bool divides_first_;  // f16: ranks exchange averages, because the sums may overflow
  FrameHeader frame_;
  Stages stages_;
};

}  // namespace comm_core
