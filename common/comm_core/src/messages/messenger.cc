#include "messages/messenger.h"

#include <algorithm>

#include "base/clock.h"

namespace comm_core {

namespace {

// Limit for the bytes of buffered small messages without a receive: beyond it the program is wrong.
constexpr size_t kMostHeld = size_t(1) << 30;

}  // namespace

Messenger::Messenger(MessageGroup group)
    : group_(std::move(group)),
      windows_(group_, *this),
      senders_(size_t(group_.size())),
      receivers_(size_t(group_.size())),
      gone_(size_t(group_.size())) {}

Messenger::~Messenger() = default;

void Messenger::enter(int peer, Arrival& arrival) {
  std::unique_ptr<MessageReceiver>& receiver = receivers_[size_t(peer)];
  if (receiver != nullptr) return;
  receiver = std::make_unique<MessageReceiver>(group_, *this, peer, arrival);
  receiver->on_event();
}

MessageSender* Messenger::sender(int peer) {
  std::unique_ptr<MessageSender>& sender = senders_[size_t(peer)];
  try {
    if (sender == nullptr) sender = std::make_unique<MessageSender>(group_, *this, peer);
  } catch (const CommError&) {
    lost(peer, std::current_exception());
    return nullptr;
  }
  return sender.get();
}

void Messenger::start(const OpPtr& op) {
  live_.push_back(op);
  if (op->spec().kind == OpKind::recv) return receive(op);
  if (const auto error = gone(op->spec().peer)) {
    return hurt(op, error);
  }
  if (op->spec().kind == OpKind::send) return send(op);
  windows_.start(op);
}

void Messenger::send(const OpPtr& op) {
  const OpSpec& spec = op->spec();
  MessageSender* out = sender(spec.peer);
  if (out == nullptr) return;
  MessageHeader header;
  header.dtype = spec.dtype;
  header.tag = spec.tag;
  header.bytes = spec.inputs[0].bytes;
  if (header.bytes <= group_.eager_bytes) {
    out->add(header, op, true);
    return;
  }
  header.kind = MessageKind::announce;
  header.id = next_id_++;
  announced_[header.id] = op;
  out->add(header);
}

void Messenger::receive(const OpPtr& op) {
  const OpSpec& spec = op->spec();
  for (auto message = arrived_.begin(); message != arrived_.end(); ++message) {
    if ((spec.peer >= 0 && spec.peer != message->peer) || spec.tag != message->header.tag) continue;
    const Arrived found = std::move(*message);
    arrived_.erase(message);
    if (!fits(op, found.peer, found.header)) return;
    op->state().source = found.peer;
    if (found.header.kind == MessageKind::announce) {
      matched(op, found.peer, found.header);
      return;
    }
    held_bytes_ -= found.payload.size();
    std::copy(found.payload.begin(), found.payload.end(), spec.outputs[0].data);
    finished(op);
    return;
  }
  // Checked last, because the peer may have sent the message before it was lost.
  if (const auto error = gone(spec.peer)) {
    return hurt(op, error);
  }
  posted_.push_back(op);
}

OpPtr Messenger::take_posted(int peer, uint64_t tag) {
  for (auto it = posted_.begin(); it != posted_.end(); ++it) {
    const OpSpec& spec = (*it)->spec();
    if ((spec.peer < 0 || spec.peer == peer) && spec.tag == tag) {
      OpPtr op = *it;
      posted_.erase(it);
      op->state().source = peer;
      return op;
    }
  }
  return nullptr;
}

bool Messenger::fits(const OpPtr& op, int peer, const MessageHeader& header) {
  const OpSpec& spec = op->spec();
  if (spec.outputs[0].bytes == header.bytes && spec.dtype == header.dtype) return true;
  group_.fail(std::make_exception_ptr(
      MismatchError("the ranks disagree: " + op->describe() + " here expects " +
                    std::to_string(spec.outputs[0].bytes) + " bytes of " + name(spec.dtype) + ", " +
                    group_.labels[size_t(peer)] + " sends " + std::to_string(header.bytes) +
                    " bytes of " + name(header.dtype))));
  return false;
}

void Messenger::arrived(int peer, const MessageHeader& header, MessageReceiver& receiver) {
  switch (header.kind) {
    case MessageKind::eager: {
      if (header.bytes > group_.eager_bytes) malformed(peer);
      OpPtr op = take_posted(peer, header.tag);
      if (op != nullptr) {
        if (fits(op, peer, header)) receiver.into(op);
        return;
      }
      held_bytes_ += header.bytes;
      if (held_bytes_ > kMostHeld) {
        throw MismatchError("more than " + std::to_string(kMostHeld) +
                            " bytes of messages wait for a receive, the last from " +
                            group_.labels[size_t(peer)]);
      }
      receiver.hold();
      return;
    }
    case MessageKind::announce: {
      OpPtr op = take_posted(peer, header.tag);
      if (op == nullptr) {
        arrived_.push_back({peer, header, ""});
      } else if (fits(op, peer, header)) {
        matched(op, peer, header);
      }
      return;
    }
    case MessageKind::request: {
      const auto found = announced_.find(header.id);
      if (found == announced_.end()) return;  // the send has timed out meanwhile
      OpPtr op = found->second;
      announced_.erase(found);
      MessageHeader data;
      data.kind = MessageKind::data;
      data.dtype = op->spec().dtype;
      data.id = header.id;
      data.bytes = op->spec().inputs[0].bytes;
      if (MessageSender* out = sender(peer)) out->add(data, op, true);
      return;
    }
    case MessageKind::data: {
      const auto found = expected_.find({peer, header.id});
      if (found == expected_.end() || found->second->spec().outputs[0].bytes != header.bytes) {
        malformed(peer);
      }
      receiver.into(found->second);
      expected_.erase(found);
      return;
    }
    default:
      if (header.kind > MessageKind::reply) malformed(peer);
      windows_.arrived(peer, header, receiver);
  }
}

void Messenger::malformed(int peer) const {
  throw MismatchError("malformed message from " + group_.labels[size_t(peer)]);
}

void Messenger::held(int peer, const MessageHeader& header, std::string payload) {
  if (header.kind != MessageKind::eager) return windows_.held(peer, header, payload);
  // A receive may have been posted while the payload was arriving.
  OpPtr op = take_posted(peer, header.tag);
  if (op == nullptr) {
    arrived_.push_back({peer, header, std::move(payload)});
    return;
  }
  held_bytes_ -= payload.size();
  if (!fits(op, peer, header)) return;
  std::copy(payload.begin(), payload.end(), op->spec().outputs[0].data);
  finished(op);
}

void Messenger::matched(const OpPtr& op, int peer, const MessageHeader& announcement) {
  if (const auto error = gone(peer)) {
    return hurt(op, error);
  }
  expected_[{peer, announcement.id}] = op;
  MessageHeader request;
  request.kind = MessageKind::request;
  request.id = announcement.id;
  if (MessageSender* out = sender(peer)) out->add(request);
}

void Messenger::finished(const OpPtr& op, std::exception_ptr error) {
  const auto found = std::find(live_.begin(), live_.end(), op);
  if (found == live_.end()) return;
  const OpPtr keep = op;
  live_.erase(found);
  group_.complete(keep, error);
}

// Returns why `peer` (-1: every peer) is lost, or null if messages can still come.
std::exception_ptr Messenger::gone(int peer) const {
  if (peer >= 0) return gone_[size_t(peer)];
  std::exception_ptr last;
  for (int r = 0; r < group_.size(); ++r) {
    if (r == group_.rank) continue;
    last = gone_[size_t(r)];
    if (!last) return nullptr;
  }
  return last;
}

void Messenger::left(int peer) {
  // With a connection, its end arrives after all messages of the peer and is handled then.
  if (receivers_[size_t(peer)] != nullptr) return;
  lost(peer, std::make_exception_ptr(
                 PeerLostError("lost " + group_.labels[size_t(peer)] + ": it left the group")));
}

void Messenger::lost(int peer, const std::exception_ptr& loss) {
  const std::exception_ptr error = group_.explained(loss);
  if (!gone_[size_t(peer)]) gone_[size_t(peer)] = error;
  const bool all = gone(-1) != nullptr;
  std::vector<OpPtr> ending;
  for (const OpPtr& op : live_) {
    const bool waits = all && op->spec().peer < 0 && op->state().source < 0;
    if (op->spec().peer == peer || op->state().source == peer || waits) ending.push_back(op);
  }
  posted_.remove_if(
      [&](const OpPtr& op) { return op->spec().peer == peer || (all && op->spec().peer < 0); });
  windows_.lost(peer);
  if (senders_[size_t(peer)] != nullptr) senders_[size_t(peer)]->break_off();
  if (receivers_[size_t(peer)] != nullptr) receivers_[size_t(peer)]->break_off();
  for (const OpPtr& op : ending) hurt(op, error);
}

// Fails an operation whose peer is lost. The process may end for that, and the others ask why.
void Messenger::hurt(const OpPtr& op, const std::exception_ptr& loss) {
  const std::exception_ptr error = with_context(loss, op->describe() + ": ");
  group_.warn(message_of(error));
  finished(op, error);
}

void Messenger::fail(const std::exception_ptr& error) {
  for (auto& sender : senders_) {
    if (sender != nullptr) sender->break_off();
  }
  for (auto& receiver : receivers_) {
    if (receiver != nullptr) receiver->break_off();
  }
  posted_.clear();
  announced_.clear();
  expected_.clear();
  windows_.forget();
  const std::list<OpPtr> ending = std::move(live_);
  live_.clear();
  for (const OpPtr& op : ending) {
    group_.complete(op, with_context(error, op->describe() + ": "));
  }
}

double Messenger::next_deadline_s(double now_s) {
  double next = kNever;
  for (const OpPtr& op : live_) {
    if (op->state().deadline_s <= now_s) {
      const OpSpec& spec = op->spec();
      const std::string whom = spec.peer < 0 ? "any rank" : group_.labels[size_t(spec.peer)];
      const OpPtr late = op;
      const auto error = std::make_exception_ptr(
          TimeoutError(late->describe() + ": timed out waiting for " + whom));
      live_.remove(late);  // the errors of the other operations add their own names
      group_.fail(error);  // before its caller hears of it, who may destroy this group at once
      group_.complete(late, error);
      return kNever;
    }
    next = std::min(next, op->state().deadline_s);
  }
  return next;
}

}  // namespace comm_core
