#include "tcp/messenger.h"

#include <algorithm>

#include "group.h"

namespace comm_core {

namespace {

constexpr uint32_t kMagic = 0x434d4d53;
// Small messages that nobody has asked for; more than this and the program has lost its way.
constexpr size_t kMostHeld = size_t(1) << 30;

}  // namespace

// Writes the messages for one peer, one after the other.
class Messenger::Sender : public Watcher {
 public:
  Sender(Messenger& messenger, int peer)
      : messenger_(messenger),
        peer_(peer),
        link_(messenger.group_.target(peer, LinkKind::messages)) {
    id_ = poller().add(link_.fd(), Watch::always, this);
  }
  ~Sender() override { poller().remove(id_, link_.fd(), Watch::always); }

  void add(const Header& header, OpPtr op) {
    queue_.push_back({header, std::move(op)});
    on_event();
  }

  // Touches no operation's memory any more.
  void break_off() {
    broken_ = true;
    queue_.clear();
  }

  void on_event() override {
    if (broken_) return;
    try {
      if (!link_.ready()) return;
      while (!queue_.empty() && advance()) {
      }
    } catch (const CommError&) {
      break_off();
      messenger_.lost(peer_, std::current_exception());
    }
  }

 private:
  struct Item {
    Header header;
    OpPtr op;  // whose input is the payload; null if there is none
    size_t done = 0;
  };

  Poller& poller() { return messenger_.group_.engine().poller(); }

  bool advance() {
    Item& item = queue_.front();
    constexpr size_t kHeader = sizeof(Header);
    const bool pays = item.op != nullptr;
    const size_t total = kHeader + (pays ? item.header.bytes : 0);
    iovec parts[2];
    int num_parts = 0;
    if (item.done < kHeader) {
      parts[num_parts++] = {reinterpret_cast<char*>(&item.header) + item.done, kHeader - item.done};
    }
    const size_t body = item.done < kHeader ? 0 : item.done - kHeader;
    if (pays && body < item.header.bytes) {
      const ConstSpan& block = item.op->spec().inputs[0];
      parts[num_parts++] = {const_cast<char*>(block.data) + body, block.bytes - body};
    }
    const size_t sent = link_.write(parts, num_parts);
    item.done += sent;
    if (item.done < total) return sent > 0;
    OpPtr op = std::move(item.op);
    queue_.pop_front();
    if (op != nullptr) messenger_.finished(op);
    return true;
  }

  Messenger& messenger_;
  int peer_;
  OutLink link_;
  uint64_t id_;
  bool broken_ = false;
  std::deque<Item> queue_;
};

// Reads the messages of one peer.
class Messenger::Receiver : public Watcher {
 public:
  Receiver(Messenger& messenger, int peer, Fd fd)
      : messenger_(messenger), peer_(peer), link_(std::move(fd), messenger.group_.peer(peer).label) {
    id_ = poller().add(link_.fd(), Watch::always, this);
  }
  ~Receiver() override { poller().remove(id_, link_.fd(), Watch::always); }

  // Where the payload of the present message goes: into an operation, or aside until asked for.
  void into(OpPtr op) { op_ = std::move(op); }
  void hold() { holding_ = true; }
  // Touches no operation's memory any more.
  void break_off() {
    broken_ = true;
    op_ = nullptr;
  }

  void on_event() override {
    if (broken_) return;
    try {
      while (advance()) {
      }
    } catch (const CommError&) {
      break_off();
      messenger_.lost(peer_, std::current_exception());
    }
  }

 private:
  Poller& poller() { return messenger_.group_.engine().poller(); }

  bool advance() {
    if (have_ < sizeof header_) {
      const size_t got =
          link_.read(reinterpret_cast<char*>(&header_) + have_, sizeof header_ - have_);
      have_ += got;
      if (have_ < sizeof header_) return got > 0;
      if (header_.magic != kMagic) throw MismatchError("malformed message from " + link_.peer());
      done_ = 0;
      op_ = nullptr;
      holding_ = false;
      messenger_.arrived(peer_, header_, *this);
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
      messenger_.finished(std::exchange(op_, nullptr));
    } else {
      messenger_.held(peer_, header_, std::move(held_));
    }
    return !broken_;
  }

  Messenger& messenger_;
  int peer_;
  Link link_;
  uint64_t id_;
  bool broken_ = false;
  Header header_;
  size_t have_ = 0, done_ = 0;
  OpPtr op_;
  bool holding_ = false;
  std::string held_;
};

Messenger::Messenger(Group& group)
    : group_(group), senders_(size_t(group.size())), receivers_(size_t(group.size())) {}

Messenger::~Messenger() = default;

void Messenger::accept(int peer, Fd fd) {
  std::unique_ptr<Receiver>& receiver = receivers_[size_t(peer)];
  if (receiver != nullptr) return;
  receiver = std::make_unique<Receiver>(*this, peer, std::move(fd));
  receiver->on_event();
}

void Messenger::post(int peer, Header header, OpPtr op) {
  std::unique_ptr<Sender>& sender = senders_[size_t(peer)];
  try {
    if (sender == nullptr) sender = std::make_unique<Sender>(*this, peer);
  } catch (const CommError&) {
    lost(peer, std::current_exception());
    return;
  }
  header.magic = kMagic;
  sender->add(header, std::move(op));
}

void Messenger::send(const OpPtr& op) {
  const OpSpec& spec = op->spec();
  live_.push_back(op);
  Header header{};
  header.dtype = spec.dtype;
  header.tag = spec.tag;
  header.bytes = spec.inputs[0].bytes;
  if (header.bytes <= group_.options().tcp_eager) {
    header.kind = Kind::eager;
    post(spec.peer, header, op);
  } else {
    header.kind = Kind::announce;
    header.id = next_id_++;
    announced_[header.id] = op;
    post(spec.peer, header, nullptr);
  }
}

void Messenger::receive(const OpPtr& op) {
  const OpSpec& spec = op->spec();
  live_.push_back(op);
  for (auto message = arrived_.begin(); message != arrived_.end(); ++message) {
    if ((spec.peer >= 0 && spec.peer != message->peer) || spec.tag != message->header.tag) continue;
    const Arrived found = std::move(*message);
    const bool small = found.header.kind == Kind::eager;
    arrived_.erase(message);
    if (!fits(op, found.peer, found.header)) return;
    op->source_ = found.peer;
    if (small) {
      held_bytes_ -= found.payload.size();
      std::copy(found.payload.begin(), found.payload.end(), spec.outputs[0].data);
      finished(op);
    } else {
      matched(op, found.peer, found.header);
    }
    return;
  }
  posted_.push_back(op);
}

OpPtr Messenger::take_posted(int peer, uint64_t tag) {
  for (auto it = posted_.begin(); it != posted_.end(); ++it) {
    const OpSpec& spec = (*it)->spec();
    if ((spec.peer < 0 || spec.peer == peer) && spec.tag == tag) {
      OpPtr op = *it;
      posted_.erase(it);
      op->source_ = peer;
      return op;
    }
  }
  return nullptr;
}

bool Messenger::fits(const OpPtr& op, int peer, const Header& header) {
  const OpSpec& spec = op->spec();
  if (spec.outputs[0].bytes == header.bytes && spec.dtype == header.dtype) return true;
  group_.fail(std::make_exception_ptr(MismatchError(
                  "the ranks disagree: " + op->describe() + " here expects " +
                  std::to_string(spec.outputs[0].bytes) + " bytes of " + name(spec.dtype) + ", " +
                  group_.peer(peer).label + " sends " + std::to_string(header.bytes) +
                  " bytes of " + name(header.dtype))),
              true);
  return false;
}

void Messenger::arrived(int peer, const Header& header, Receiver& receiver) {
  switch (header.kind) {
    case Kind::eager: {
      if (header.bytes > group_.options().tcp_eager) {
        throw MismatchError("malformed message from " + group_.peer(peer).label);
      }
      OpPtr op = take_posted(peer, header.tag);
      if (op != nullptr) {
        if (fits(op, peer, header)) receiver.into(op);
        return;
      }
      held_bytes_ += header.bytes;
      if (held_bytes_ > kMostHeld) {
        throw MismatchError("messages of more than " + std::to_string(kMostHeld) +
                            " bytes wait for a receive, the last from " + group_.peer(peer).label);
      }
      receiver.hold();
      return;
    }
    case Kind::announce: {
      OpPtr op = take_posted(peer, header.tag);
      if (op == nullptr) {
        arrived_.push_back({peer, header, ""});
      } else if (fits(op, peer, header)) {
        matched(op, peer, header);
      }
      return;
    }
    case Kind::request: {
      const auto found = announced_.find(header.id);
      if (found == announced_.end()) return;  // the send has timed out meanwhile
      OpPtr op = found->second;
      announced_.erase(found);
      Header data{};
      data.kind = Kind::data;
      data.dtype = op->spec().dtype;
      data.id = header.id;
      data.bytes = op->spec().inputs[0].bytes;
      post(peer, data, op);
      return;
    }
    case Kind::data: {
      const auto found = expected_.find({peer, header.id});
      if (found == expected_.end() || found->second->spec().outputs[0].bytes != header.bytes) {
        throw MismatchError("unexpected data from " + group_.peer(peer).label);
      }
      receiver.into(found->second);
      expected_.erase(found);
      return;
    }
  }
  throw MismatchError("malformed message from " + group_.peer(peer).label);
}

void Messenger::held(int peer, const Header& header, std::string payload) {
  // Asked for while it was arriving?
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

void Messenger::matched(const OpPtr& op, int peer, const Header& announcement) {
  expected_[{peer, announcement.id}] = op;
  Header request{};
  request.kind = Kind::request;
  request.id = announcement.id;
  post(peer, request, nullptr);
}

void Messenger::finished(const OpPtr& op, std::exception_ptr error) {
  const auto found = std::find(live_.begin(), live_.end(), op);
  if (found == live_.end()) return;
  const OpPtr keep = op;
  live_.erase(found);
  group_.engine().complete(keep, error);
}

void Messenger::lost(int peer, const std::exception_ptr& error) {
  std::vector<OpPtr> hurt;
  for (const OpPtr& op : live_) {
    if (op->spec().peer == peer || op->source_ == peer) hurt.push_back(op);
  }
  posted_.remove_if([&](const OpPtr& op) { return op->spec().peer == peer; });
  if (senders_[size_t(peer)] != nullptr) senders_[size_t(peer)]->break_off();
  if (receivers_[size_t(peer)] != nullptr) receivers_[size_t(peer)]->break_off();
  for (const OpPtr& op : hurt) {
    finished(op, with_context(error, op->describe() + ": "));
  }
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
  const std::list<OpPtr> ending = std::move(live_);
  live_.clear();
  for (const OpPtr& op : ending) {
    group_.engine().complete(op, with_context(error, op->describe() + ": "));
  }
}

double Messenger::check_deadlines(double now_s) {
  double next = -1;
  for (const OpPtr& op : live_) {
    if (op->deadline_s_ <= now_s) {
      const OpSpec& spec = op->spec();
      const std::string whom = spec.peer < 0 ? "any rank" : group_.peer(spec.peer).label;
      group_.fail(std::make_exception_ptr(TimeoutError(
                      op->describe() + ": timed out waiting for " + whom)),
                  true);
      return -1;
    }
    if (next < 0 || op->deadline_s_ < next) next = op->deadline_s_;
  }
  return next;
}

}  // namespace comm_core
