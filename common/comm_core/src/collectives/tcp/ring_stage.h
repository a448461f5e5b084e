// Collectives on a ring as byte streams: each rank sends to the next and receives from the previous
// at the same time, without a step or a hand-shake per block, so that the wire never rests.
//
// Cost on n ranks and N bytes: reduce_scatter and all_gather each (n-1) hops and (n-1)/n N bytes
// out of and into every rank; broadcast n-1 hops and N bytes.
#pragma once

#include <memory>
#include <vector>

#include "base/scratch.h"
#include "collectives/stage.h"
#include "tcp/link.h"

namespace comm_core {

class Group;

struct Ring {
  std::vector<int> ranks;  // of the group, in ring order
  int place = 0;           // of this rank
  int size() const { return int(ranks.size()); }
  int next() const { return ranks[size_t((place + 1) % size())]; }
  int previous() const { return ranks[size_t((place + size() - 1) % size())]; }
  // Index of the block `back` places behind this rank's.
  size_t block(int back) const { return size_t(((place - back) % size() + size()) % size()); }
};

// The two connections and what has passed them; frames begin with a header.
class RingStage : public Stage {
 public:
  RingStage(Group& group, Ring ring, FrameHeader frame, uint64_t bytes_out, uint64_t bytes_in);
  std::string status() const override;

 protected:
  // True when the header has been sent, or received and checked.
  bool out_ready();
  bool in_ready();
  // Sends up to a chunk of `block` from `offset` on; 0 if there is no room. Likewise receives.
  size_t send(const char* data, size_t bytes);
  size_t receive(char* data, size_t bytes, size_t low_water);
  void finish();

  Group& group_;
  const Ring ring_;
  const size_t chunk_;     // moved per step and direction
  const size_t worth_it_;  // a sleeping engine is not woken for less
  FrameHeader frame_;
  const uint64_t total_out_, total_in_;
  uint64_t sent_ = 0, received_ = 0;

 private:
  size_t header_sent_ = 0;
  bool header_received_ = false;
};

// inputs[i]: this rank's contribution to the block of the rank at place i. The block of this rank's
// place ends in `output`, folded in ring order starting behind its owner.
class RingReduceStage : public RingStage {
 public:
  RingReduceStage(Group& group, Ring ring, FrameHeader frame, DType dtype, ReduceOp op,
                  std::vector<ConstSpan> inputs, Span output, int64_t divisor);
  Progress step() override;

 private:
  static uint64_t capacity(Group& group, const Ring& ring, const std::vector<ConstSpan>& inputs);
  size_t place(uint64_t at) const { return size_t((at - origin_) % capacity_); }
  bool take_in();
  bool fold();
  bool give_out();

  const DType dtype_;
  const ReduceOp op_;
  const std::vector<ConstSpan> inputs_;
  const Span output_;
  const int64_t divisor_;
  const uint64_t capacity_;
  Scratch buffer_;       // circular: partial sums between this rank's two connections
  uint64_t origin_ = 0;  // the place in the incoming stream that is at its front
  uint64_t folded_ = 0;  // bytes of the incoming stream
  int fold_block_ = 2;   // how many places behind
  size_t fold_offset_ = 0;
  int arriving_block_ = 2;
  uint64_t arriving_end_ = 0;  // in the incoming stream
};

// Blocks pass through: all_gather (everybody starts with one) and broadcast (the root with all).
class RingForwardStage : public RingStage {
 public:
  // Sends `own`, then what arrives, as far as `outgoing` bytes in all; receives into `incoming`.
  RingForwardStage(Group& group, Ring ring, FrameHeader frame, std::vector<ConstSpan> own,
                   std::vector<Span> incoming, uint64_t outgoing);
  Progress step() override;

 private:
  const std::vector<Span> incoming_;
  std::vector<ConstSpan> outgoing_;
  uint64_t own_bytes_;
  size_t in_block_ = 0, in_offset_ = 0, out_block_ = 0, out_offset_ = 0;
};

}  // namespace comm_core
