// The stages of collectives between ranks that have lanes to each other.
#pragma once

#include <memory>
#include <vector>

#include "collectives/frame.h"
#include "collectives/stage.h"

namespace comm_core {

class Group;

// Direct exchange: a block to each of some ranks and a block from each of some, all at once. One
// hop, and what small messages, all_to_all, gather and scatter are made of.
struct Sending {
  int peer;
  ConstSpan block;
};
struct Receiving {
  int peer;
  Span block;
};
std::unique_ptr<Stage> exchange(Group& group, const FrameHeader& frame,
                                const std::vector<Sending>& sending,
                                const std::vector<Receiving>& receiving);

// On a ring collectives are byte streams: each rank sends to the next and receives from the
// previous at the same time, without a step or a hand-shake per block, so that the wire never
// rests.
//
// Cost on n ranks and N bytes: reduce_scatter and all_gather each (n-1) hops and (n-1)/n N bytes
// out of and into every rank; broadcast n-1 hops and N bytes.
struct Ring {
  std::vector<int> ranks;  // of the group, in ring order
  int place = 0;           // of this rank
  int size() const { return int(ranks.size()); }
  int next() const { return ranks[size_t((place + 1) % size())]; }
  int previous() const { return ranks[size_t((place + size() - 1) % size())]; }
  // Index of the block `back` places behind this rank's.
  size_t block(int back) const { return size_t(((place - back) % size() + size()) % size()); }
};

// inputs[i]: this rank's contribution to the block of the rank at place i. The block of this rank's
// place ends in `output`, folded in ring order starting behind its owner; divided if `divisor` > 0.
std::unique_ptr<Stage> ring_reduce(Group& group, const Ring& ring, const FrameHeader& frame,
                                   std::vector<ConstSpan> inputs, Span output, int64_t divisor);

// Blocks pass through: all_gather (everybody starts with one) and broadcast (the root with all).
// Sends `own`, then what arrives, as far as `outgoing` bytes in all; receives into `incoming`.
std::unique_ptr<Stage> ring_forward(Group& group, const Ring& ring, const FrameHeader& frame,
                                    std::vector<ConstSpan> own, std::vector<Span> incoming,
                                    uint64_t outgoing);

}  // namespace comm_core
