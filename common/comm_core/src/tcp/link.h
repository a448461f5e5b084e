// One direction of a connection between two ranks of a group. The sender connects; nothing blocks.
#pragma once

#include <sys/uio.h>

#include <string>

#include "engine/poller.h"
#include "tcp/wire.h"

namespace comm_core {

// A connected socket with a name for messages.
class Link {
 public:
  Link(Fd fd, std::string peer) : fd_(std::move(fd)), peer_(std::move(peer)) {}
  virtual ~Link() = default;
  int fd() const { return fd_.get(); }
  const std::string& peer() const { return peer_; }

  // Bytes taken or given; 0 if the kernel has no room or no data now. Throws PeerLostError.
  size_t write(const iovec* parts, int num_parts);
  size_t write(const void* data, size_t bytes);
  size_t read(void* data, size_t bytes);
  // All of `bytes`, of which `done` have passed in earlier calls: true at the end, with `done` 0.
  bool flush(const void* data, size_t bytes, size_t& done);
  bool fill(void* data, size_t bytes, size_t& done);

  // Wakes a waiting engine only when so many bytes are there (SO_RCVLOWAT): fewer context switches.
  void set_low_water(size_t bytes);
  // The kernel takes about so many bytes that it cannot send yet, not all that its buffer would
  // hold (TCP_NOTSENT_LOWAT): what is urgent waits for those only.
  void limit_unsent(size_t bytes);
  Fd take() && { return std::move(fd_); }

 protected:
  Fd fd_;
  std::string peer_;
  int low_water_ = 1;
};

// Receives frames: a header, then its payload.
class InLink : public Link {
 public:
  using Link::Link;
  // True once the next frame's header is there, of which the payload is next. Throws MismatchError
  // unless it is `mine` with a payload of `bytes`.
  bool expect(FrameHeader mine, uint64_t bytes);

 private:
  FrameHeader header_;
  size_t have_ = 0;
};

struct LinkTarget {
  Address address;
  std::string peer;  // "rank 3 (host b, 10.0.0.2:4242)"
  std::string secret;
  Hello hello;  // the nonce is filled in here
  SocketOptions options;
};

// Connects, proves that it knows the job's secret, and has the acceptor prove it too.
class OutLink : public Link {
 public:
  explicit OutLink(const LinkTarget& target);
  // Goes on with the handshake; true once payload may be sent. Throws PeerLostError.
  bool ready();

 private:
  enum class State { connecting, greeting, challenged, proving, doubting, ready };

  LinkTarget target_;
  State state_ = State::connecting;
  size_t done_ = 0;
  Bytes16 challenge_{};
  Digest proof_{}, answer_{};
};

}  // namespace comm_core
