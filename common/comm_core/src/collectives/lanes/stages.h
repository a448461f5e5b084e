// Stages of collectives over lanes.
#pragma once

#include <memory>
#include <vector>

#include "collectives/frame.h"
#include "engine/stage.h"

namespace comm_core {

class Lanes;
class ScratchPool;

// Blocks of a direct exchange, which sends a block to each of some ranks and receives one from each
// of others at the same time. It takes one hop. Small collectives, all_to_all, gather and scatter
// use it.
struct Sending {
  int peer;
  ConstSpan block;
};
struct Receiving {
  int peer;
  Span block;
};
// Returns the stage of a direct exchange. The caller owns the memory of the blocks, here and below.
std::unique_ptr<Stage> exchange(Lanes& lanes, const FrameHeader& frame,
                                const std::vector<Sending>& sending,
                                const std::vector<Receiving>& receiving);

// Ring of ranks. Collectives on it are byte streams: each rank sends to the next and receives from
// the previous at the same time. There are no steps or hand-shakes per block, so the wire is never
// idle.
//
// Cost with n ranks and N bytes: reduce_scatter and all_gather take n-1 hops each, and every rank
// sends and receives (n-1)/n N bytes. A broadcast takes n-1 hops and N bytes.
struct Ring {
  std::vector<int> ranks;  // ranks in the group, in ring order
  int place = 0;           // position of this rank
  int size() const { return int(ranks.size()); }
  int next() const { return ranks[size_t((place + 1) % size())]; }
  int previous() const { return ranks[size_t((place + size() - 1) % size())]; }
  // Returns the index of the block that is `back` positions behind this rank's.
  size_t block(int back) const { return size_t(((place - back) % size() + size()) % size()); }
};

// Returns the stage of a ring reduce-scatter. inputs[i] is this rank's contribution to block i,
// which the rank at position i gets. `output` gets the block of this rank's position. A block is
// reduced in ring order, beginning with the rank after its owner, and divided if `divisor` > 0.
std::unique_ptr<Stage> ring_reduce(Lanes& lanes, ScratchPool& scratch, const Ring& ring,
                                   const FrameHeader& frame, std::vector<ConstSpan> inputs,
                                   Span output, int64_t divisor);

// Returns the stage that forwards blocks: of an all_gather (every rank begins with one block) or a
// broadcast (the root begins with all). It receives into `incoming`, and sends `own` and then what
// it receives, up to `outgoing` bytes in total.
std::unique_ptr<Stage> ring_forward(Lanes& lanes, const Ring& ring, const FrameHeader& frame,
                                    std::vector<ConstSpan> own, std::vector<Span> incoming,
                                    uint64_t outgoing);

}  // namespace comm_core
