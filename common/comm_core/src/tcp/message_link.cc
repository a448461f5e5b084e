#include "tcp/message_link.h"

#include "group.h"

namespace comm_core {

namespace {

constexpr uint32_t kMagic = 0x434d4d53;

bool announces(MessageKind kind) {
  return kind == MessageKind::announce || kind == MessageKind::get;
}

}  // namespace

MessageSender::MessageSender(Group& group, MessageHandler& handler, int peer)
    : group_(group),
      handler_(handler),
      peer_(peer),
      link_(group.target(peer, LinkKind::messages)) {
  id_ = group_.engine().poller().add(link_.fd(), Watch::always, this);
}

MessageSender::~MessageSender() {
  group_.engine().poller().remove(id_, link_.fd(), Watch::always);
}

void MessageSender::add(const MessageHeader& header, OpPtr op) {
  const bool ends = op != nullptr;
  enqueue({header, std::move(op), "", ends});
}

void MessageSender::add(const MessageHeader& header, std::string payload) {
  enqueue({header, nullptr, std::move(payload), false});
}

void MessageSender::add_request(const MessageHeader& header, OpPtr op) {
  enqueue({header, std::move(op), "", false});
}

void MessageSender::enqueue(Item item) {
  if (broken_) return;
  item.header.magic = kMagic;
  queue_.push_back(std::move(item));
  on_event();
}

void MessageSender::break_off() {
  broken_ = true;
  queue_.clear();
}

void MessageSender::on_event() {
  if (broken_) return;
  try {
    if (!link_.ready()) return;
    while (!queue_.empty() && advance()) {
    }
  } catch (const CommError&) {
    break_off();
    handler_.lost(peer_, std::current_exception());
  }
}

bool MessageSender::advance() {
  Item& item = queue_.front();
  constexpr size_t kHeader = sizeof(MessageHeader);
  const size_t bytes = announces(item.header.kind) ? 0 : item.header.bytes;
  iovec parts[2];
  int num_parts = 0;
  if (item.done < kHeader) {
    parts[num_parts++] = {reinterpret_cast<char*>(&item.header) + item.done, kHeader - item.done};
  }
  const size_t body = item.done < kHeader ? 0 : item.done - kHeader;
  if (body < bytes) {
    const char* data = item.op != nullptr ? item.op->spec().inputs[0].data : item.payload.data();
    parts[num_parts++] = {const_cast<char*>(data) + body, bytes - body};
  }
  const size_t sent = link_.write(parts, num_parts);
  item.done += sent;
  if (item.done < kHeader + bytes) return sent > 0;
  const OpPtr op = item.ends ? std::move(item.op) : nullptr;
  queue_.pop_front();
  if (op != nullptr) handler_.moved(op);
  return true;
}

MessageReceiver::MessageReceiver(Group& group, MessageHandler& handler, int peer, Fd fd)
    : group_(group), handler_(handler), peer_(peer), link_(std::move(fd), group.peer(peer).label) {
  id_ = group_.engine().poller().add(link_.fd(), Watch::always, this);
}

MessageReceiver::~MessageReceiver() {
  group_.engine().poller().remove(id_, link_.fd(), Watch::always);
}

void MessageReceiver::break_off() {
  broken_ = true;
  op_ = nullptr;
}

void MessageReceiver::on_event() {
  if (broken_) return;
  try {
    while (advance()) {
    }
  } catch (const CommError&) {
    break_off();
    handler_.lost(peer_, std::current_exception());
  }
}

bool MessageReceiver::advance() {
  if (have_ < sizeof header_) {
    const size_t got =
        link_.read(reinterpret_cast<char*>(&header_) + have_, sizeof header_ - have_);
    have_ += got;
    if (have_ < sizeof header_) return got > 0;
    if (header_.magic != kMagic) throw MismatchError("malformed message from " + link_.peer());
    done_ = 0;
    op_ = nullptr;
    holding_ = false;
    handler_.arrived(peer_, header_, *this);
    if (broken_) return false;
    if (holding_) held_.resize(header_.bytes);
  }
  if (op_ == nullptr && !holding_) {
    have_ = 0;
    return true;
  }
  char* to = op_ != nullptr ? op_->spec().outputs[0].data : held_.data();
  if (done_ < header_.bytes) {
    const size_t got = link_.read(to + done_, header_.bytes - done_);
    done_ += got;
    if (done_ < header_.bytes) return got > 0;
  }
  have_ = 0;
  if (op_ != nullptr) {
    handler_.moved(std::exchange(op_, nullptr));
  } else {
    handler_.held(peer_, header_, std::move(held_));
  }
  return !broken_;
}

}  // namespace comm_core
