#include "collectives/tcp/ring_stage.h"

#include <algorithm>

#include "group/group.h"
#include "reduce/kernels.h"

namespace comm_core {

namespace {

// On a ring of two nobody waits for pieces to be passed on: many at once save context switches.
constexpr size_t kPairPieces = 4;

uint64_t total(const std::vector<ConstSpan>& blocks) {
  uint64_t bytes = 0;
  for (const ConstSpan& block : blocks) bytes += block.bytes;
  return bytes;
}

uint64_t total(const std::vector<Span>& blocks) {
  uint64_t bytes = 0;
  for (const Span& block : blocks) bytes += block.bytes;
  return bytes;
}

}  // namespace

RingStage::RingStage(Group& group, Ring ring, FrameHeader frame, uint64_t bytes_out,
                     uint64_t bytes_in)
    : group_(group),
      ring_(std::move(ring)),
      chunk_(group.options().tcp_chunk),
      worth_it_(ring_.size() == 2 ? kPairPieces * chunk_ : chunk_ / 2),
      frame_(frame),
      total_out_(bytes_out),
      total_in_(bytes_in) {}

bool RingStage::out_ready() {
  if (header_sent_ == sizeof frame_) return true;
  OutLink& link = group_.out(ring_.next());
  if (!link.ready()) return false;
  frame_.payload_bytes = total_out_;
  header_sent_ += link.write(reinterpret_cast<const char*>(&frame_) + header_sent_,
                             sizeof frame_ - header_sent_);
  return header_sent_ == sizeof frame_;
}

bool RingStage::in_ready() {
  if (header_received_) return true;
  InLink* link = group_.in(ring_.previous());
  if (link == nullptr || !link->read_header()) return false;
  FrameHeader mine = frame_;
  mine.payload_bytes = total_in_;
  check_header(mine, link->header(), link->peer());
  link->next_frame();
  header_received_ = true;
  return true;
}

size_t RingStage::send(const char* data, size_t bytes) {
  const size_t sent = group_.out(ring_.next()).write(data, std::min(bytes, chunk_));
  sent_ += sent;
  return sent;
}

size_t RingStage::receive(char* data, size_t bytes, size_t low_water) {
  InLink& link = *group_.in(ring_.previous());
  const size_t got = link.read(data, std::min(bytes, chunk_));
  received_ += got;
  // A woken engine should find a good piece; but never wait for more than the sender can give
  // before it hears from us, which is the rest of a block, or than we have room for.
  if (got == 0) link.set_low_water(std::max<size_t>(1, std::min(low_water, worth_it_)));
  return got;
}

void RingStage::finish() {
  if (total_in_ > 0) group_.in(ring_.previous())->set_low_water(1);
}

std::string RingStage::status() const {
  if (received_ < total_in_ || !header_received_) {
    return "waiting for " + group_.peer(ring_.previous()).label + " (" + std::to_string(received_) +
           " of " + std::to_string(total_in_) + " bytes received, " + std::to_string(sent_) +
           " of " + std::to_string(total_out_) + " sent)";
  }
  return "waiting for " + group_.peer(ring_.next()).label + " (" + std::to_string(sent_) + " of " +
         std::to_string(total_out_) + " bytes sent)";
}

// A rank sends a whole block of its own before it can send on what arrives meanwhile. With room for
// less than that, all ranks could fill each other's buffers and wait for ever. Two ranks send
// nothing on.
uint64_t RingReduceStage::capacity(Group& group, const Ring& ring,
                                   const std::vector<ConstSpan>& inputs) {
  size_t most = kPairPieces * group.options().tcp_chunk;
  for (const ConstSpan& block : inputs) {
    if (ring.size() > 2) most = std::max(most, block.bytes);
  }
  return (most + 63) / 64 * 64;
}

// The incoming stream is the blocks 2, 3, ... n places behind (the last is this rank's own); the
// outgoing one is the block 1 place behind as it is, then all of the incoming but the last block.
RingReduceStage::RingReduceStage(Group& group, Ring ring, FrameHeader frame, DType dtype,
                                 ReduceOp op, std::vector<ConstSpan> inputs, Span output,
                                 int64_t divisor)
    : RingStage(group, ring, frame, total(inputs) - inputs[ring.block(0)].bytes,
                total(inputs) - inputs[ring.block(1)].bytes),
      dtype_(dtype),
      op_(op),
      inputs_(std::move(inputs)),
      output_(output),
      divisor_(divisor),
      capacity_(capacity(group, ring_, inputs_)),
      buffer_(group.scratch(), capacity_) {
  arriving_end_ = inputs_[ring_.block(arriving_block_)].bytes;
}

Progress RingReduceStage::step() {
  bool moved = false;
  if (in_ready()) {
    moved = take_in();
    moved = fold() || moved;
  }
  if (out_ready()) moved = give_out() || moved;
  if (folded_ == total_in_ && sent_ == total_out_ && in_ready() && out_ready()) {
    finish();
    return Progress::done;
  }
  return moved ? Progress::moved : Progress::blocked;
}

bool RingReduceStage::take_in() {
  if (received_ == total_in_) return false;
  // What is at the front is still in the caches.
  if (ring_.size() == 2 && folded_ == received_) origin_ = received_;
  // Free are the bytes that have been sent on, and of the last block those that were folded.
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
  return receive(buffer_.data() + at, most, std::min(most, size_t(arriving_end_ - received_))) > 0;
}

bool RingReduceStage::fold() {
  bool moved = false;
  const size_t element = size_of(dtype_);
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
    char* to = last ? output_.data + fold_offset_ : arrived;
    const void* sources[2] = {arrived, block.data + fold_offset_};
    reduce(dtype_, op_, to, sources, 2, now / element);
    if (last && divisor_ > 0) divide(dtype_, to, now / element, divisor_);
    folded_ += now;
    fold_offset_ += now;
    budget -= now;
    moved = true;
  }
  return moved;
}

bool RingReduceStage::give_out() {
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

RingForwardStage::RingForwardStage(Group& group, Ring ring, FrameHeader frame,
                                   std::vector<ConstSpan> own, std::vector<Span> incoming,
                                   uint64_t outgoing)
    : RingStage(group, std::move(ring), frame, outgoing, total(incoming)),
      incoming_(std::move(incoming)),
      outgoing_(std::move(own)),
      own_bytes_(total(outgoing_)) {
  for (const Span& block : incoming_) outgoing_.push_back(block);
}

Progress RingForwardStage::step() {
  bool moved = false;
  // The ends of a broadcast's chain have one side only.
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
  if (received_ == total_in_ && sent_ == total_out_) {
    finish();
    return Progress::done;
  }
  return moved ? Progress::moved : Progress::blocked;
}

}  // namespace comm_core
