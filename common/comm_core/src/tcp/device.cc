#include "tcp/device.h"

#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/errors.h"
#include "tcp/tcp_lane.h"

namespace comm_core {

namespace {

constexpr double kHandshakeTimeoutS = 5.0;
// Limits of the unauthenticated connections: their number, and their share (1/8) of the descriptors
// that the process may have. Beyond the limit the oldest is dropped.
constexpr size_t kMostGuests = 256, kPartOfDescriptors = 8;
constexpr double kLookAgainS = 0.05;

// Returns the options of a connection with `peer`, for either end.
SocketOptions options_towards(const Address& peer, SocketOptions options) {
  // On a loopback connection, buffers that grow only evict their own data from the caches.
  if (peer.is_loopback() && options.send_buffer == 0) options.send_buffer = 256 << 10;
  if (peer.is_loopback() && options.receive_buffer == 0) options.receive_buffer = 512 << 10;
  return options;
}

// An authenticated connection.
class TcpArrival : public Arrival {
 public:
  TcpArrival(Fd fd, LaneKind kind, const SocketOptions& options)
      : fd_(std::move(fd)), kind_(kind), options_(options) {}
  std::unique_ptr<Lane> lane(std::string peer, const Watching& watching) override {
    tune_socket(fd_.get(), options_, vanished_s(kind_));
    return std::make_unique<TcpLane>(std::move(fd_), std::move(peer), watching);
  }

 private:
  Fd fd_;
  const LaneKind kind_;
  const SocketOptions options_;
};

class TcpDevice : public Device, public Watcher {
 public:
  TcpDevice(Poller& poller, const std::string& host, const SocketOptions& options)
      : poller_(poller),
        options_(options),
        address_(Address::parse(host, 0)),
        fd_(listen_on(address_, options)),
        watched_(poller, fd_.get(), Watch::always, this) {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    most_guests_ = std::clamp<size_t>(limit.rlim_cur / kPartOfDescriptors, 8, kMostGuests);
  }

  const Address& address() const override { return address_; }
  void open(const Bytes16& group, Door door) override { doors_[group] = std::move(door); }
  void close(const Bytes16& group) override { doors_.erase(group); }
  std::unique_ptr<Lane> connect(const LaneTarget& target, const Watching& watching) override {
    return std::make_unique<ConnectingLane>(target, options_towards(target.address, options_),
                                            watching);
  }
  double next_deadline_s(double now_s) override;
  uint64_t dropped() const override { return dropped_; }
  double exhausted_since_s() const override { return exhausted_since_s_; }
  void on_event() override;

 private:
  class Guest;
  void drop(Guest* guest);
  void admit(Guest* guest);

  Poller& poller_;
  const SocketOptions options_;
  Address address_;
  Fd fd_;
  Watched watched_;
  std::map<Bytes16, Door> doors_;
  std::unordered_map<Guest*, std::unique_ptr<Guest>> guests_;
  uint64_t dropped_ = 0;
  size_t most_guests_;
  double look_again_s_ = kNever;  // time of the next accept after one that failed
  double exhausted_since_s_ = kNever;
};

// A connection that has not authenticated yet.
class TcpDevice::Guest : public Watcher {
 public:
  Guest(TcpDevice& device, Fd fd)
      : device_(device),
        link_(std::move(fd), "an unidentified connection", {device.poller_, Watch::always, this}),
        deadline_s_(now_s() + kHandshakeTimeoutS) {}

  void on_event() override {
    bool proved = false;
    try {
      proved = acceptance_.advance(link_, [this](const Bytes16& group) {
        const auto door = device_.doors_.find(group);
        return door == device_.doors_.end() ? nullptr : &door->second;
      });
    } catch (const CommError&) {
      device_.drop(this);
      return;  // `drop` has destroyed this object
    }
    if (proved) device_.admit(this);
  }

  const Hello& hello() const { return acceptance_.hello(); }
  double deadline_s() const { return deadline_s_; }
  Fd release() { return std::move(link_).take(); }

 private:
  TcpDevice& device_;
  TcpLane link_;
  double deadline_s_;
  Acceptance acceptance_;
};

void TcpDevice::on_event() {
  look_again_s_ = kNever;
  const double since_s = std::exchange(exhausted_since_s_, kNever);
  for (;;) {
    const int fd = accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      // Out of descriptors or memory. The kernel reports a connection only once, so accept is
      // called again later.
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      look_again_s_ = now_s() + kLookAgainS;
      exhausted_since_s_ = std::min(since_s, now_s());
      return;
    }
    if (guests_.size() >= most_guests_) {
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

void TcpDevice::drop(Guest* guest) {
  ++dropped_;
  guests_.erase(guest);
}

void TcpDevice::admit(Guest* guest) {
  const Hello hello = guest->hello();
  Fd fd = guest->release();
  guests_.erase(guest);
  const LaneName name{hello.group, hello.from, hello.to, hello.kind};
  // The own address serves as well as the peer's: both are loopback, or neither is.
  doors_.at(hello.group)
      .enter(name, std::make_unique<TcpArrival>(std::move(fd), hello.kind,
                                                options_towards(address_, options_)));
}

// Also accepts connections for which no descriptor was free before.
double TcpDevice::next_deadline_s(double now_s) {
  if (look_again_s_ <= now_s) on_event();
  double next = look_again_s_;
  std::vector<Guest*> late;
  for (const auto& guest : guests_) {
    const double deadline = guest.first->deadline_s();
    if (deadline <= now_s) {
      late.push_back(guest.first);
    } else {
      next = std::min(next, deadline);
    }
  }
  for (Guest* guest : late) drop(guest);
  return next;
}

}  // namespace

std::unique_ptr<Device> tcp_device(Poller& poller, const std::string& host,
                                   const SocketOptions& options) {
  return std::make_unique<TcpDevice>(poller, host, options);
}

}  // namespace comm_core
