#include "tcp/listener.h"

#include <sys/socket.h>

#include <cerrno>

#include "base/clock.h"

namespace comm_core {

namespace {

constexpr double kHandshakeTimeoutS = 5.0;
// More strangers than this at a time, and the oldest goes.
constexpr size_t kMaxGuests = 1024;

}  // namespace

// A connection that has not yet proved that it belongs here.
class Listener::Guest : public Watcher {
 public:
  Guest(Listener& listener, Fd fd)
      : listener_(listener),
        link_(std::move(fd), "a stranger"),
        deadline_s_(now_s() + kHandshakeTimeoutS) {
    id_ = listener_.poller_.add(link_.fd(), Watch::always, this);
  }
  ~Guest() override {
    if (fd_owned_) listener_.poller_.remove(id_, link_.fd(), Watch::always);
  }

  void on_event() override {
    try {
      if (advance()) listener_.admit(this);
    } catch (const CommError&) {
      listener_.drop(this);
    }
  }

  const Hello& hello() const { return hello_; }
  double deadline_s() const { return deadline_s_; }
  Fd release() {
    listener_.poller_.remove(id_, link_.fd(), Watch::always);
    fd_owned_ = false;
    return std::move(link_).take();
  }

 private:
  // True when the guest has proved itself and was answered.
  bool advance() {
    if (!greeted_) {
      if (!link_.fill(&hello_, sizeof hello_, have_)) return false;
      const auto group = listener_.groups_.find(hello_.group);
      const bool known = hello_.magic == kHelloMagic && group != listener_.groups_.end() &&
                         hello_.from >= 0 && hello_.from < group->second.size &&
                         hello_.to == group->second.rank && hello_.from != hello_.to &&
                         int(hello_.kind) < kNumLinkKinds;
      if (!known) throw CommError("not for us");
      random_bytes(challenge_.data(), challenge_.size());
      send(challenge_.data(), challenge_.size());
      greeted_ = true;
    }
    if (!link_.fill(proof_.data(), proof_.size(), have_)) return false;
    const auto group = listener_.groups_.find(hello_.group);
    if (group == listener_.groups_.end()) throw CommError("the group is gone");
    const std::string& secret = group->second.secret;
    if (!equal_constant_time(proof_, proof(secret, 'c', hello_, challenge_))) {
      throw CommError("wrong secret");
    }
    const Digest answer = proof(secret, 's', hello_, challenge_);
    send(answer.data(), answer.size());
    return true;
  }

  // A new connection has room for these few bytes; if not, it is no peer of ours.
  void send(const void* data, size_t bytes) {
    if (link_.write(data, bytes) != bytes) throw CommError("no room to answer");
  }

  Listener& listener_;
  Link link_;
  uint64_t id_;
  double deadline_s_;
  bool fd_owned_ = true;
  bool greeted_ = false;
  size_t have_ = 0;
  Hello hello_;
  Bytes16 challenge_{};
  Digest proof_{};
};

Listener::Listener(Poller& poller, Address address, const SocketOptions& options)
    : poller_(poller), address_(address), fd_(listen_on(address_, options)) {
  id_ = poller_.add(fd_.get(), Watch::always, this);
}

Listener::~Listener() {
  guests_.clear();
  poller_.remove(id_, fd_.get(), Watch::always);
}

void Listener::on_event() {
  for (;;) {
    const int fd = accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return;  // EAGAIN, or out of descriptors: the caller's time-out will tell
    }
    if (guests_.size() >= kMaxGuests) {
      Guest* oldest = guests_.begin()->first;
      for (const auto& guest : guests_) {
        if (guest.first->deadline_s() < oldest->deadline_s()) oldest = guest.first;
      }
      drop(oldest);
    }
    auto guest = std::make_unique<Guest>(*this, Fd(fd));
    Guest* key = guest.get();
    guests_[key] = std::move(guest);
    key->on_event();
  }
}

void Listener::drop(Guest* guest) {
  ++dropped_;
  guests_.erase(guest);
}

void Listener::admit(Guest* guest) {
  const Hello hello = guest->hello();
  Fd fd = guest->release();
  guests_.erase(guest);
  groups_.at(hello.group).accept(hello, std::move(fd));
}

double Listener::expire(double now_s) {
  double next = -1;
  std::vector<Guest*> late;
  for (const auto& guest : guests_) {
    const double deadline = guest.first->deadline_s();
    if (deadline <= now_s) {
      late.push_back(guest.first);
    } else if (next < 0 || deadline < next) {
      next = deadline;
    }
  }
  for (Guest* guest : late) drop(guest);
  return next;
}

}  // namespace comm_core
