// The stages of collectives between the ranks of one host: rounds through their streams in shared
// memory, or buffers that everybody reads where they are.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/frame.h"
#include "collectives/stage.h"
#include "group/group.h"

namespace comm_core {

// all_reduce, in rounds that stay in the caches: each rank stages its part of a round, folds the
// portion it owns, and the others copy the result out.
struct ShmAllReducePlan {
  ConstSpan input;
  Span output;          // may be the same memory
  int64_t divisor = 0;  // > 0: divide the result by it
  bool flat = false;    // one round; everybody folds everything: one hand-over instead of two
};
std::unique_ptr<Stage> shm_all_reduce(Group& group, const FrameHeader& frame,
                                      const ShmAllReducePlan& plan);

// reduce_scatter and reduce: each rank stages the blocks of others in its stream; the owner of a
// block folds all of them, in rank order, into his output.
struct ShmReducePlan {
  // Of this rank: the block of each local rank, as long as the others' for him; empty for nobody's.
  std::vector<ConstSpan> inputs;
  Span output;          // this rank's block, reduced; may be inputs[me]
  int64_t divisor = 0;  // > 0: divide the result by it
  bool streaming = false;
};
std::unique_ptr<Stage> shm_reduce(Group& group, const FrameHeader& frame, ShmReducePlan plan);

// all_gather, broadcast, gather, scatter, all_to_all and barrier: senders write rounds of their
// blocks into their streams, receivers copy them out.
struct ShmCopyPlan {
  // One block for everybody (multicast: outputs[0]), or one for each local rank.
  bool multicast = true;
  std::vector<ConstSpan> outgoing;
  // What is expected from each local rank.
  std::vector<Span> incoming;
  // How many rounds each rank's stream has in this stage; kUntilLast: until it says so.
  static constexpr int64_t kUntilLast = -1;
  std::vector<int64_t> rounds;
  // Whose rounds concern this rank; the others are skipped without a look.
  std::vector<bool> listens;
  // Bytes of one receiver in a round: the whole slot, or a part of it for each of several.
  size_t portion = 0;
  bool streaming = false;
};
std::unique_ptr<Stage> shm_copy(Group& group, const FrameHeader& frame, ShmCopyPlan plan);

// reduce_scatter, all_gather and all_reduce whose inputs all lie in shared buffers: everybody reads
// them where they are. If they do not, it hands over to stages that copy.
struct ShmDirectPlan {
  ConstSpan input;  // all of this rank's, one piece of memory; empty: not to be read in place
  // Does the work on bytes [begin, end) of `total`, given everybody's input.
  std::function<void(const std::vector<char*>& inputs, size_t begin, size_t end)> work;
  size_t total = 0;
  size_t chunk = 256 << 10;
  std::function<Stages()> otherwise;
};
std::unique_ptr<Stage> shm_direct(Group& group, const FrameHeader& frame, ShmDirectPlan plan);

// Rounds that blocks of at most `bytes` need; never 0, so that every sender is checked.
int64_t rounds_for(size_t bytes, size_t portion);
// What each of the other ranks has of a slot that they share.
size_t shared_portion(const ShmStreams& streams);

// What the four have in common.
class ShmStage : public Stage {
 protected:
  ShmStage(Group& group, const FrameHeader& frame)
      : group_(group),
        streams_(*group.shm()),
        frame_(frame),
        n_(streams_.size()),
        me_(streams_.me()) {}
  // Of a local rank, for messages.
  const std::string& label(int r) const;
  // The labels of the others of whom `come` is false, with commas.
  std::string late(const std::function<bool(int r)>& come) const;
  // Whether local rank r's stream has a round for this rank. Throws PeerLostError if r has left.
  bool arrived(int r, int stream) const;
  // Of a round that this rank writes, and of one that is there.
  void put_frame(SlotHeader& header) const;
  static FrameHeader frame_of(const SlotHeader& header);
  // Throws MismatchError unless r, whose round is there, has called the same and sends `bytes`.
  void check(int r, size_t bytes) const;
  // The place of reader r among the portions of a slot of writer w.
  size_t place(int r, int w, size_t portion) const {
    return portion == streams_.slot_bytes() ? 0 : size_t(r < w ? r : r - 1) * portion;
  }

  Group& group_;
  ShmStreams& streams_;
  const FrameHeader frame_;
  const int n_, me_;  // of the ranks of this host
};

}  // namespace comm_core
