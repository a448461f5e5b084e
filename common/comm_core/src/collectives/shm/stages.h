// Stages of collectives between the ranks of one host: rounds through the streams in shared memory,
// or shared buffers that all ranks read in place. The callers own the memory in the plans.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/frame.h"
#include "collectives/view.h"
#include "engine/stage.h"

namespace comm_core {

// all_reduce in rounds that stay in the caches: each rank copies its input of a round into its
// stream and reduces the portion that it owns, and the others copy the result.
struct ShmAllReducePlan {
  ConstSpan input;
  Span output;          // may be the memory of `input`
  int64_t divisor = 0;  // > 0: divide the result by it
  bool flat = false;    // every rank reduces everything: one exchange per round instead of two
};
std::unique_ptr<Stage> shm_all_reduce(const LocalRanks& local, const FrameHeader& frame,
                                      const ShmAllReducePlan& plan);

// reduce_scatter and reduce: each rank copies its inputs for the others into its stream. The owner
// of a block reduces all contributions, in rank order, into its output.
struct ShmReducePlan {
  // This rank's contribution to the block of each local rank, as long as those of the others to
  // that block. Empty if that rank gets no block.
  std::vector<ConstSpan> inputs;
  Span output;             // this rank's reduced block; may be the memory of inputs[me]
  int64_t divisor = 0;     // > 0: divide the result by it
  bool streaming = false;  // write the output past the caches
};
std::unique_ptr<Stage> shm_reduce(const LocalRanks& local, const FrameHeader& frame,
                                  ShmReducePlan plan);

// all_gather, broadcast, gather, scatter, all_to_all and barrier: senders copy their blocks into
// their streams in rounds, and receivers copy them to their memory.
struct ShmCopyPlan {
  // One block for all ranks (multicast: outgoing[0]), or one for each local rank.
  bool multicast = true;
  std::vector<ConstSpan> outgoing;
  // Where the block from each local rank goes.
  std::vector<Span> incoming;
  // Rounds of each rank's stream in this stage. kUntilLast: until its header marks the last one.
  static constexpr int64_t kUntilLast = -1;
  std::vector<int64_t> rounds;
  // Ranks whose rounds this rank reads. The rounds of the others are skipped unread.
  std::vector<bool> listens;
  // Bytes per receiver and round: a whole slot, or an equal part of it for each receiver.
  size_t portion = 0;
  bool streaming = false;  // write the output past the caches
};
std::unique_ptr<Stage> shm_copy(const LocalRanks& local, const FrameHeader& frame,
                                ShmCopyPlan plan);

// reduce_scatter, all_gather and all_reduce of inputs in shared buffers, which all ranks read in
// place. If the input of any rank is elsewhere, all ranks run the stages of `otherwise` instead.
struct ShmDirectPlan {
  ConstSpan input;  // all input of this rank, in one piece; empty: it cannot be read in place
  // Does the work on bytes [begin, end) of `total`, with the mapped inputs of all local ranks.
  std::function<void(const std::vector<char*>& inputs, size_t begin, size_t end)> work;
  size_t total = 0;
  size_t chunk = 256 << 10;
  std::function<Stages()> otherwise;
};
std::unique_ptr<Stage> shm_direct(const LocalRanks& local, const FrameHeader& frame,
                                  ShmDirectPlan plan);

// Returns the rounds that a block of `bytes` bytes needs: at least 1, so that every sender's header
// is checked.
int64_t rounds_for(size_t bytes, size_t portion);
// Returns the bytes per reader of a slot that all other ranks share, a multiple of 64.
size_t shared_portion(const ShmStreams& streams);

// Base class of the four stages.
class ShmStage : public Stage {
 protected:
  ShmStage(const LocalRanks& local, const FrameHeader& frame)
      : local_(local),
        streams_(local.streams),
        frame_(frame),
        n_(streams_.size()),
        me_(streams_.me()) {}
  // Returns the label of local rank r, for messages.
  const std::string& label(int r) const { return local_.labels[size_t(r)]; }
  // Returns the labels, joined by commas, of the other ranks for which `come` is false.
  std::string late(const std::function<bool(int r)>& come) const;
  // The same of the ranks that have not read what this rank has written.
  std::string unread() const;
  // Returns whether `stream` of local rank r has a round to read. Throws PeerLostError if it has
  // none and r has left.
  bool arrived(int r, int stream) const;
  // Write this stage's frame into a slot, and read the frame of a slot.
  void put_frame(SlotHeader& header) const;
  static FrameHeader frame_of(const SlotHeader& header);
  // Checks the round of r at the front of its stream. Throws MismatchError unless r has called the
  // same operation and sends `bytes` bytes.
  void check(int r, size_t bytes) const;
  // Returns the offset in bytes of reader r's portion in a slot of writer w.
  size_t place(int r, int w, size_t portion) const {
    return portion == streams_.slot_bytes() ? 0 : size_t(r < w ? r : r - 1) * portion;
  }

  const LocalRanks& local_;
  ShmStreams& streams_;
  const FrameHeader frame_;
  const int n_, me_;  // number of ranks on this host, and this rank among them
};

}  // namespace comm_core
