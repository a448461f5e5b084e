#include "messages/message_link.h"

#include <algorithm>

#include "messages/messenger.h"

namespace comm_core {

namespace {

constexpr uint32_t kMagic = 0x434d4d54;

// Bytes that an overtaking message waits for at most: a piece, and the unsent bytes in the kernel.
// The kernel asks for more when half of its bytes are left, which must last until the engine wakes.
constexpr size_t kPiece = size_t(512) << 10;
constexpr size_t kUnsent = size_t(1) << 20;

size_t payload_of(const MessageHeader& header) {
  const bool promises = header.kind == MessageKind::announce || header.kind == MessageKind::get;
  return promises ? 0 : header.bytes;
}

// Returns whether a message may overtake large payloads. One-sided requests keep their order, and
// messages with a large payload keep theirs.
bool overtakes(const MessageHeader& header) {
  switch (header.kind) {
    case MessageKind::eager:
    case MessageKind::announce:
    case MessageKind::request: return true;
    case MessageKind::reply: return header.bytes == 0;
    default: return false;
  }
}

}  // namespace

MessageSender::MessageSender(const MessageGroup& group, Messenger& messenger, int peer)
    : messenger_(messenger),
      peer_(peer),
      lane_(group.connect(peer, {group.poller, Watch::always, this})) {
  lane_->limit_unsent(kUnsent);
}

void MessageSender::enqueue(Item item) {
  if (broken_) return;
  item.header.magic = kMagic;
  (overtakes(item.header) ? small_ : queue_).push_back(std::move(item));
  on_event();
}

void MessageSender::break_off() {
  broken_ = true;
  sending_ = nullptr;
  small_.clear();
  queue_.clear();
}

void MessageSender::on_event() {
  if (broken_) return;
  try {
    if (!lane_->ready()) return;
    while (!(small_.empty() && queue_.empty()) && advance()) {
    }
  } catch (const CommError&) {
    break_off();
    messenger_.lost(peer_, std::current_exception());
  }
}

std::deque<MessageSender::Item>& MessageSender::begin_frame() {
  std::deque<Item>& from = small_.empty() ? queue_ : small_;
  const Item& item = from.front();
  frame_ = item.header;
  if (item.done > 0) frame_.kind = MessageKind::more;
  frame_done_ = 0;
  const size_t left = payload_of(item.header) - item.done;
  piece_left_ = overtakes(item.header) ? left : std::min(left, kPiece);
  return from;
}

bool MessageSender::advance() {
  if (sending_ == nullptr) sending_ = &begin_frame();
  Item& item = sending_->front();
  iovec parts[2];
  int num_parts = 0;
  const size_t header_left = sizeof frame_ - frame_done_;
  if (header_left > 0) {
    parts[num_parts++] = {reinterpret_cast<char*>(&frame_) + frame_done_, header_left};
  }
  if (piece_left_ > 0) {
    const char* data = item.op != nullptr ? item.op->spec().inputs[0].data : item.payload.data();
    parts[num_parts++] = {const_cast<char*>(data) + item.done, piece_left_};
  }
  const size_t sent = lane_->write(parts, num_parts);
  if (sent == 0) {
    // No byte of the frame was sent, so messages that are queued now may still overtake it.
    if (frame_done_ == 0) sending_ = nullptr;
    return false;
  }
  const size_t of_header = std::min(sent, header_left);
  frame_done_ += of_header;
  item.done += sent - of_header;
  piece_left_ -= sent - of_header;
  if (frame_done_ < sizeof frame_ || piece_left_ > 0) return true;
  std::deque<Item>& from = *std::exchange(sending_, nullptr);
  if (item.done < payload_of(item.header)) return true;
  const OpPtr op = item.ends ? std::move(item.op) : nullptr;
  from.pop_front();
  if (op != nullptr) messenger_.finished(op);
  return true;
}

MessageReceiver::MessageReceiver(const MessageGroup& group, Messenger& messenger, int peer,
                                 Arrival& arrival)
    : messenger_(messenger),
      peer_(peer),
      lane_(arrival.lane(group.labels[size_t(peer)], {group.poller, Watch::always, this})) {}

void MessageReceiver::break_off() {
  broken_ = true;
  small_.op = nullptr;
  large_.op = nullptr;
}

void MessageReceiver::malformed() const {
  throw MismatchError("malformed message from " + lane_->peer());
}

void MessageReceiver::on_event() {
  if (broken_) return;
  try {
    while (advance()) {
    }
  } catch (const CommError&) {
    break_off();
    messenger_.lost(peer_, std::current_exception());
  }
}

// Handles a complete header. Returns true if its payload is to be read.
bool MessageReceiver::begin_frame() {
  if (frame_.magic != kMagic) malformed();
  if (frame_.kind == MessageKind::more) {
    if (large_.done == large_.bytes) malformed();
    reading_ = &large_;
  } else {
    const bool small = overtakes(frame_);
    if (!small && large_.done < large_.bytes) malformed();
    reading_ = small ? &small_ : &large_;
    *reading_ = {frame_, nullptr, false, "", 0, 0};
    messenger_.arrived(peer_, frame_, *this);
    if (broken_) return false;
    reading_->bytes = payload_of(frame_);
    if (reading_->holding) reading_->held.resize(reading_->bytes);
    if (reading_->bytes > 0 && reading_->op == nullptr && !reading_->holding) malformed();
  }
  const size_t left = reading_->bytes - reading_->done;
  piece_left_ = reading_ == &small_ ? left : std::min(left, kPiece);
  return true;
}

bool MessageReceiver::advance() {
  if (reading_ == nullptr) {
    if (!lane_->fill(&frame_, sizeof frame_, frame_done_) || !begin_frame()) return false;
  }
  Incoming& message = *reading_;
  if (piece_left_ > 0) {
    char* to = message.op != nullptr ? message.op->spec().outputs[0].data : message.held.data();
    const size_t got = lane_->read(to + message.done, piece_left_);
    message.done += got;
    piece_left_ -= got;
    if (piece_left_ > 0) return got > 0;
  }
  reading_ = nullptr;
  if (message.done < message.bytes) return true;
  Incoming whole = std::exchange(message, {});
  if (whole.op != nullptr) {
    messenger_.finished(whole.op);
  } else if (whole.holding) {
    messenger_.held(peer_, whole.header, std::move(whole.held));
  }
  return !broken_;
}

}  // namespace comm_core
