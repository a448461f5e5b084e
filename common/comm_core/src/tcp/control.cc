#include "tcp/control.h"

#include <cstdlib>
#include <cstring>

#include "group/group.h"

namespace comm_core {

namespace {

constexpr uint32_t kMagic = 0x434d4354;
constexpr size_t kMostText = 4096;

}  // namespace

class Control::Line : public Watcher {
 public:
  Line(Control& control, int peer, std::unique_ptr<Link> link, OutLink* handshake)
      : control_(control), peer_(peer), link_(std::move(link)), handshake_(handshake) {
    id_ = control_.group_.engine().poller().add(link_->fd(), Watch::always, this);
  }
  ~Line() override { close(); }

  // It has been connected; the other side may have left in peace since.
  bool greeted() const { return handshake_ == nullptr; }

  void on_event() override {
    if (closed_) return;
    try {
      if (handshake_ != nullptr) {
        if (!handshake_->ready()) return;
        handshake_ = nullptr;
      }
      flush();
      while (receive()) {
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
  void close() {
    if (!closed_) control_.group_.engine().poller().remove(id_, link_->fd(), Watch::always);
    closed_ = true;
  }

  void flush() {
    try {
      while (!pending_.empty()) {
        const size_t sent = link_->write(pending_.data(), pending_.size());
        if (sent == 0) return;
        pending_.erase(0, sent);
      }
    } catch (const CommError&) {
      // Its goodbye may still be there to be read, and if not, then its end.
      pending_.clear();
    }
  }

  bool receive() {
    Message message;
    size_t wanted = sizeof message;
    if (heard_.size() >= sizeof message) {
      memcpy(&message, heard_.data(), sizeof message);
      if (message.magic != kMagic || message.text_bytes > kMostText) {
        throw MismatchError("malformed control message from " + link_->peer());
      }
      wanted += message.text_bytes;
    }
    if (heard_.size() < wanted) {
      char buffer[512];
      const size_t got = link_->read(buffer, std::min(sizeof buffer, wanted - heard_.size()));
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
  std::unique_ptr<Link> link_;
  OutLink* handshake_;
  uint64_t id_ = 0;
  bool closed_ = false;
  std::string heard_, pending_;
};

Control::Control(Group& group)
    : group_(group), lines_(size_t(group.size())), left_(size_t(group.size())) {
  if (group.rank() == 0) return;
  auto link = std::make_unique<OutLink>(group.target(0, LinkKind::control));
  OutLink* handshake = link.get();
  lines_[0] = std::make_unique<Line>(*this, 0, std::move(link), handshake);
}

Control::~Control() = default;

void Control::accept(int peer, Fd fd) {
  if (group_.rank() != 0 || lines_[size_t(peer)] != nullptr) return;
  auto link = std::make_unique<Link>(std::move(fd), group_.peer(peer).label);
  lines_[size_t(peer)] = std::make_unique<Line>(*this, peer, std::move(link), nullptr);
  lines_[size_t(peer)]->send(farewells_);
}

bool Control::connected() const {
  if (group_.rank() != 0) return lines_[0]->greeted();
  for (size_t peer = 1; peer < lines_.size(); ++peer) {
    if (lines_[peer] == nullptr) return false;
  }
  return true;
}

void Control::tell_failure(const std::string& reason) {
  send_all(Kind::failure, group_.rank(), reason, -1);
}

void Control::tell_goodbye(uint64_t finished) {
  send_all(Kind::goodbye, group_.rank(), std::to_string(finished), -1);
}

void Control::show(const FrameHeader& frame) {
  send_all(Kind::waiting, group_.rank(),
           std::string(reinterpret_cast<const char*>(&frame), sizeof frame), -1);
}

void Control::send_all(Kind kind, int from, const std::string& text, int except) {
  Message message{kMagic, kind, 0, uint16_t(std::min(text.size(), kMostText)), from};
  std::string bytes(reinterpret_cast<const char*>(&message), sizeof message);
  bytes += text.substr(0, kMostText);
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
  if (group_.rank() == 0) send_all(kind, from, text, line);
  if (kind == Kind::goodbye) {
    left_[size_t(from)] = true;
    group_.peer_left(from, strtoull(text.c_str(), nullptr, 10));
    return;
  }
  group_.fail(std::make_exception_ptr(AbortedError(group_.peer(from).label + " gave up: " + text)),
              false);
}

void Control::lost(int line, const std::string& reason) {
  // Whoever said goodbye may close; without rank 0 the others are on their own.
  if (left_[size_t(line)]) return;
  group_.fail(std::make_exception_ptr(PeerLostError(reason)), group_.rank() == 0);
}

}  // namespace comm_core
