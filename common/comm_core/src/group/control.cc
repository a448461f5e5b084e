#include "group/control.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "collectives/frame.h"
#include "group/group.h"

namespace comm_core {

namespace {

constexpr uint32_t kMagic = 0x434d4354;
constexpr size_t kMostText = 4096;
constexpr int kHubs = 2;

}  // namespace

// One control connection.
class Control::Line : public Watcher {
 public:
  // Connects to a hub.
  Line(Control& control, int peer)
      : control_(control),
        peer_(peer),
        lane_(control.group_.connect(peer, LaneKind::control, watching())) {}
  // Takes over the connection of another rank.
  Line(Control& control, int peer, Arrival& arrival)
      : control_(control),
        peer_(peer),
        lane_(arrival.lane(control.group_.peer(peer).label, watching())),
        greeted_(true) {}

  // Returns whether the connection was authenticated. The peer may have left since.
  bool greeted() const { return greeted_; }

  void on_event() override {
    if (closed_) return;
    try {
      if (!lane_->ready()) return;
      greeted_ = true;
      flush();
      while (!closed_ && receive()) {
      }
    } catch (const CommError& error) {
      close();
      control_.lost(peer_, error.what());
    }
  }

  void send(const std::string& bytes) {
    pending_ += bytes;
    if (greeted() && !closed_) flush();
  }

 private:
  Watching watching() { return {control_.group_.engine().poller(), Watch::always, this}; }

  void close() {
    lane_->ignore();
    closed_ = true;
  }

  void flush() {
    try {
      while (!pending_.empty()) {
        const size_t sent = lane_->write(pending_.data(), pending_.size());
        if (sent == 0) return;
        pending_.erase(0, sent);
      }
    } catch (const CommError&) {
      // Ignored: reading will yield the peer's goodbye or the end of the connection.
      pending_.clear();
    }
  }

  bool receive() {
    Message message;
    size_t wanted = sizeof message;
    if (heard_.size() >= sizeof message) {
      memcpy(&message, heard_.data(), sizeof message);
      if (message.magic != kMagic || message.kind > Kind::trouble ||
          message.text_bytes > kMostText) {
        throw MismatchError("malformed control message from " + lane_->peer());
      }
      wanted += message.text_bytes;
    }
    if (heard_.size() < wanted) {
      char buffer[512];
      const size_t got = lane_->read(buffer, std::min(sizeof buffer, wanted - heard_.size()));
      if (got == 0) return false;
      heard_.append(buffer, got);
      return true;
    }
    const std::string text = heard_.substr(sizeof message);
    heard_.clear();
    control_.heard(peer_, message.kind, message.from, text);
    return true;
  }

  Control& control_;
  int peer_;
  std::unique_ptr<Lane> lane_;
  bool greeted_ = false;
  bool closed_ = false;
  std::string heard_, pending_;
};

Control::Control(Group& group)
    : group_(group),
      lines_(size_t(group.size())),
      left_(size_t(group.size())),
      lost_(size_t(group.size())),
      troubled_(size_t(group.size())) {
  for (int hub = 0; hub < std::min(kHubs, group.rank()); ++hub) {
    lines_[size_t(hub)] = std::make_unique<Line>(*this, hub);
  }
}

Control::~Control() = default;

bool Control::passes_on() const { return group_.rank() < kHubs; }

void Control::enter(int peer, Arrival& arrival) {
  if (!passes_on() || peer <= group_.rank() || lines_[size_t(peer)] != nullptr) return;
  lines_[size_t(peer)] = std::make_unique<Line>(*this, peer, arrival);
  lines_[size_t(peer)]->send(farewells_);
}

int Control::absent() const {
  const size_t expected = passes_on() ? lines_.size() : size_t(kHubs);
  for (size_t peer = 0; peer < expected; ++peer) {
    if (int(peer) == group_.rank()) continue;
    if (lines_[peer] == nullptr || !lines_[peer]->greeted()) return int(peer);
  }
  return -1;
}

void Control::tell_failure(const std::string& reason, bool mismatch) {
  failed_ = true;
  send_all(mismatch ? Kind::mismatch : Kind::failure, group_.rank(), reason, -1);
}

void Control::tell_trouble(const std::string& reason) {
  if (failed_ || troubled_[size_t(group_.rank())]) return;
  troubled_[size_t(group_.rank())] = true;
  send_all(Kind::trouble, group_.rank(), reason, -1);
}

void Control::tell_goodbye(uint64_t finished) {
  send_all(Kind::goodbye, group_.rank(), std::to_string(finished), -1);
}

void Control::listen() {
  for (const auto& line : lines_) {
    if (line != nullptr) line->on_event();
  }
}

void Control::show(const FrameHeader& frame) {
  lines_[0]->send(packed(Kind::waiting, group_.rank(),
                         std::string(reinterpret_cast<const char*>(&frame), sizeof frame)));
}

std::string Control::packed(Kind kind, int from, const std::string& text) {
  const Message message{kMagic, kind, 0, uint16_t(std::min(text.size(), kMostText)), from};
  return std::string(reinterpret_cast<const char*>(&message), sizeof message) +
         text.substr(0, kMostText);
}

void Control::send_all(Kind kind, int from, const std::string& text, int except) {
  const std::string bytes = packed(kind, from, text);
  if (kind == Kind::goodbye) farewells_ += bytes;
  for (size_t peer = 0; peer < lines_.size(); ++peer) {
    if (lines_[peer] != nullptr && int(peer) != except) lines_[peer]->send(bytes);
  }
}

void Control::heard(int line, Kind kind, int from, const std::string& text) {
  if (from < 0 || from >= group_.size()) return;
  if (kind == Kind::waiting) {
    FrameHeader frame;
    if (group_.rank() != 0 || text.size() != sizeof frame) return;
    memcpy(&frame, text.data(), sizeof frame);
    group_.compare(from, frame);
    return;
  }
  // A report arrives from both hubs. Only the first is handled and forwarded.
  if (kind == Kind::goodbye ? left_[size_t(from)] : failed_) return;
  if (kind == Kind::lost && lost_[size_t(from)]) return;
  if (kind == Kind::trouble && troubled_[size_t(from)]) return;
  if (passes_on()) send_all(kind, from, text, line);
  if (kind == Kind::lost) return told_lost(from, text);
  if (kind == Kind::trouble) {
    troubled_[size_t(from)] = true;
    group_.peer_in_trouble(from, text);
    return;
  }
  if (kind == Kind::goodbye) {
    left_[size_t(from)] = true;
    group_.peer_left(from, strtoull(text.c_str(), nullptr, 10));
    return;
  }
  failed_ = true;
  const std::string reason = group_.peer(from).label + " failed: " + text;
  group_.fail(kind == Kind::mismatch ? std::make_exception_ptr(MismatchError(reason))
                                     : std::make_exception_ptr(AbortedError(reason)),
              false);
}

void Control::lost(int line, const std::string& reason) {
  if (left_[size_t(line)]) return;  // a rank that said goodbye may close its connection
  if (passes_on()) send_all(Kind::lost, line, reason, line);
  told_lost(line, reason);
}

void Control::told_lost(int peer, const std::string& reason) {
  lost_[size_t(peer)] = true;
  group_.peer_lost(std::make_exception_ptr(PeerLostError(reason)));
}

}  // namespace comm_core
