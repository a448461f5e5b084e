#include <algorithm>

#include "collectives/collectives.h"
#include "collectives/lanes/lanes.h"
#include "collectives/lanes/stages.h"
#include "collectives/regimes.h"
#include "reduce/kernels.h"

namespace comm_core {
namespace {

template <typename Blocks>
uint64_t longest(const Blocks& blocks) {
  uint64_t bytes = 0;
  for (const auto& block : blocks) bytes = std::max<uint64_t>(bytes, block.bytes);
  return bytes;
}

// Base class of the ring stages: the lanes to the next and from the previous rank, and the bytes
// that they have carried. Each stream begins with a header.
class RingStage : public Stage {
 public:
  RingStage(Lanes& lanes, const Ring& ring, const FrameHeader& frame, uint64_t bytes_out,
            uint64_t bytes_in, uint64_t longest_block)
      : lanes_(lanes),
        ring_(ring),
        chunk_(lanes.chunk()),
        worth_it_(ring_piece(longest_block, ring.size(), lanes.chunk())),
        frame_(frame),
        total_out_(bytes_out),
        total_in_(bytes_in) {}

  std::string status() const override {
    const std::string sent = std::to_string(sent_) + " of " + std::to_string(total_out_);
    if (received_ < total_in_ || !header_received_) {
      return "waiting for " + lanes_.label(ring_.previous()) + " (" + std::to_string(received_) +
             " of " + std::to_string(total_in_) + " bytes received, " + sent + " sent)";
    }
    return "waiting for " + lanes_.label(ring_.next()) + " (" + sent + " bytes sent)";
  }

 protected:
  // Return true once the header is sent, or is received and checked.
  bool out_ready() {
    if (header_sent_ == sizeof frame_) return true;
    Lane& lane = lanes_.out(ring_.next());
    if (!lane.ready()) return false;
    frame_.payload_bytes = total_out_;
    const iovec part{reinterpret_cast<char*>(&frame_) + header_sent_, sizeof frame_ - header_sent_};
    header_sent_ += lanes_.write(lane, &part, 1);
    return header_sent_ == sizeof frame_;
  }

  bool in_ready() {
    if (header_received_) return true;
    Lane* lane = lanes_.in(ring_.previous());
    header_received_ = lane != nullptr && reader_.expect(*lane, frame_, total_in_);
    if (header_received_) lanes_.meet_peer();
    return header_received_;
  }

  // Send or receive up to a chunk. Return the bytes moved: 0 if none can be moved now.
  size_t send(const char* data, size_t bytes) {
    const iovec part{const_cast<char*>(data), std::min(bytes, chunk_)};
    const size_t sent = lanes_.write(lanes_.out(ring_.next()), &part, 1);
    sent_ += sent;
    return sent;
  }

  size_t receive(char* data, size_t bytes, size_t low_water) {
    Lane& lane = *lanes_.in(ring_.previous());
    const size_t got = lane.read(data, std::min(bytes, chunk_));
    received_ += got;
    // The engine should wake for a large piece only. But it must not wait for more than it has room
    // for, or than the sender can send without data from this rank, which is the rest of a block.
    if (got == 0) lane.wake_from(std::max<size_t>(1, std::min(low_water, worth_it_)));
    return got;
  }

  void finish() {
    if (total_in_ > 0) lanes_.in(ring_.previous())->wake_from(1);
  }

  Lanes& lanes_;
  const Ring ring_;
  const size_t chunk_;     // moved per step and direction
  const size_t worth_it_;  // a sleeping engine is not woken for less
  FrameHeader frame_;
  const uint64_t total_out_, total_in_;
  uint64_t sent_ = 0, received_ = 0;

 private:
  size_t header_sent_ = 0;
  bool header_received_ = false;
  FrameReader reader_;
};

// The incoming stream has the blocks 2, 3, ... n positions behind (the last is this rank's own).
// The outgoing stream has the unreduced block 1 position behind, and then all incoming blocks but
// the last, each reduced with this rank's input.
class RingReduceStage : public RingStage {
 public:
  RingReduceStage(Lanes& lanes, ScratchPool& scratch, const Ring& ring, const FrameHeader& frame,
                  std::vector<ConstSpan> inputs, Span output, int64_t divisor)
      : RingStage(lanes, ring, frame, total(inputs) - inputs[ring.block(0)].bytes,
                  total(inputs) - inputs[ring.block(1)].bytes, longest(inputs)),
        inputs_(std::move(inputs)),
        output_(output),
        divisor_(divisor),
        divides_first_(divisor > 0 && frame.dtype == DType::f16),
        capacity_(capacity()),
        buffer_(scratch, capacity_) {
    arriving_end_ = inputs_[ring_.block(arriving_block_)].bytes;
  }

  Progress step() override {
    bool moved = false;
    if (in_ready()) {
      moved = take_in();
      moved = fold_arrived() || moved;
    }
    if (out_ready()) moved = give_out() || moved;
    const bool all = folded_ == total_in_ && sent_ == total_out_ && in_ready() && out_ready();
    if (all) finish();
    return progress(all, moved);
  }

 private:
  // A rank sends a whole block of its own before it forwards what it receives. With a smaller
  // buffer than that, all ranks could fill each other's buffers and deadlock. Two ranks forward
  // nothing.
  uint64_t capacity() const {
    size_t most = kPairPieces * chunk_;
    for (const ConstSpan& block : inputs_) {
      if (ring_.size() > 2) most = std::max(most, block.bytes);
    }
    return (most + 63) / 64 * 64;
  }

  size_t place(uint64_t at) const { return size_t((at - origin_) % capacity_); }

  bool take_in() {
    if (received_ == total_in_) return false;
    // Reuses the front of the buffer, which is still in the caches.
    if (ring_.size() == 2 && folded_ == received_) origin_ = received_;
    // Bytes are free once they are forwarded, or once they are folded in the last block.
    const uint64_t forwarded = total_in_ - output_.bytes;
    const uint64_t passed = sent_ - std::min<uint64_t>(sent_, inputs_[ring_.block(1)].bytes);
    const uint64_t freed = passed < forwarded ? passed : std::max(passed, folded_);
    const uint64_t room = capacity_ - (received_ - freed);
    const size_t at = place(received_);
    const size_t most = size_t(std::min({room, capacity_ - at, total_in_ - received_}));
    if (most == 0) return false;
    while (received_ >= arriving_end_ && arriving_block_ < ring_.size()) {
      arriving_end_ += inputs_[ring_.block(++arriving_block_)].bytes;
    }
    return receive(buffer_.data() + at, most, std::min(most, size_t(arriving_end_ - received_))) >
           0;
  }

  bool fold_arrived() {
    bool moved = false;
    const size_t element = size_of(frame_.dtype);
    size_t budget = chunk_;
    while (budget > 0 && fold_block_ <= ring_.size()) {
      const ConstSpan& block = inputs_[ring_.block(fold_block_)];
      if (fold_offset_ == block.bytes) {
        ++fold_block_;
        fold_offset_ = 0;
        continue;
      }
      const size_t at = place(folded_);
      size_t now = size_t(std::min<uint64_t>(
          {received_ - folded_, capacity_ - at, block.bytes - fold_offset_, budget}));
      now = now / element * element;
      if (now == 0) break;
      const bool last = fold_block_ == ring_.size();
      char* arrived = buffer_.data() + at;
      const void* sources[2] = {arrived, block.data + fold_offset_};
      char* to = last ? output_.data + fold_offset_ : arrived;
      if (!divides_first_) {
        fold(frame_, last ? divisor_ : 0, to, sources, 2, now);
      } else if (fold_block_ == 2) {  // the sender's plain input, not divided yet
        fold(frame_, divisor_, to, sources, 2, now);
      } else {
        average_f16(to, arrived, &sources[1], 1, now / element, divisor_);
      }
      folded_ += now;
      fold_offset_ += now;
      budget -= now;
      moved = true;
    }
    return moved;
  }

  bool give_out() {
    if (sent_ == total_out_) return false;
    const ConstSpan& first = inputs_[ring_.block(1)];
    if (sent_ < first.bytes) return send(first.data + sent_, first.bytes - sent_) > 0;
    const uint64_t passed = sent_ - first.bytes;
    const size_t at = place(passed);
    const uint64_t forwarded = total_in_ - output_.bytes;
    const size_t most =
        size_t(std::min(std::min(folded_, forwarded) - std::min(passed, folded_), capacity_ - at));
    return most > 0 && send(buffer_.data() + at, most) > 0;
  }

  const std::vector<ConstSpan> inputs_;
  const Span output_;
  const int64_t divisor_;
  const bool divides_first_;
  const uint64_t capacity_;
  Scratch buffer_;       // circular: received data, which becomes partial sums to forward
  uint64_t origin_ = 0;  // offset in the incoming stream of the buffer's front
  uint64_t folded_ = 0;  // bytes of the incoming stream
  int fold_block_ = 2;   // positions behind this rank
  size_t fold_offset_ = 0;
  int arriving_block_ = 2;
  uint64_t arriving_end_ = 0;  // end of that block, as an offset in the incoming stream
};

class RingForwardStage : public RingStage {
 public:
  RingForwardStage(Lanes& lanes, const Ring& ring, const FrameHeader& frame,
                   std::vector<ConstSpan> own, std::vector<Span> incoming, uint64_t outgoing)
      : RingStage(lanes, ring, frame, outgoing, total(incoming), longest(incoming)),
        incoming_(std::move(incoming)),
        outgoing_(std::move(own)),
        own_bytes_(total(outgoing_)) {
    outgoing_.insert(outgoing_.end(), incoming_.begin(), incoming_.end());
  }

  Progress step() override {
    bool moved = false;
    // The first and last rank of a broadcast's chain have one direction only.
    const bool takes = total_in_ > 0, gives = total_out_ > 0;
    if (takes && in_ready()) {
      while (in_block_ < incoming_.size() && in_offset_ == incoming_[in_block_].bytes) {
        ++in_block_;
        in_offset_ = 0;
      }
      if (in_block_ < incoming_.size()) {
        const Span& block = incoming_[in_block_];
        const size_t left = block.bytes - in_offset_;
        const size_t got = receive(block.data + in_offset_, left, left);
        in_offset_ += got;
        moved = got > 0;
      }
    }
    if (gives && out_ready() && sent_ < total_out_) {
      while (out_offset_ == outgoing_[out_block_].bytes) {
        ++out_block_;
        out_offset_ = 0;
      }
      const ConstSpan& block = outgoing_[out_block_];
      const uint64_t available = own_bytes_ + received_ - sent_;
      const size_t most = size_t(std::min<uint64_t>(available, block.bytes - out_offset_));
      const size_t sent = most > 0 ? send(block.data + out_offset_, most) : 0;
      out_offset_ += sent;
      moved = moved || sent > 0;
    }
    const bool all = received_ == total_in_ && sent_ == total_out_;
    if (all) finish();
    return progress(all, moved);
  }

 private:
  const std::vector<Span> incoming_;
  std::vector<ConstSpan> outgoing_;
  const uint64_t own_bytes_;
  size_t in_block_ = 0, in_offset_ = 0, out_block_ = 0, out_offset_ = 0;
};

}  // namespace

std::unique_ptr<Stage> ring_reduce(Lanes& lanes, ScratchPool& scratch, const Ring& ring,
                                   const FrameHeader& frame, std::vector<ConstSpan> inputs,
                                   Span output, int64_t divisor) {
  return std::make_unique<RingReduceStage>(lanes, scratch, ring, frame, std::move(inputs), output,
                                           divisor);
}

std::unique_ptr<Stage> ring_forward(Lanes& lanes, const Ring& ring, const FrameHeader& frame,
                                    std::vector<ConstSpan> own, std::vector<Span> incoming,
                                    uint64_t outgoing) {
  return std::make_unique<RingForwardStage>(lanes, ring, frame, std::move(own), std::move(incoming),
                                            outgoing);
}

}  // namespace comm_core
