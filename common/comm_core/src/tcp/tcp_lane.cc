#include "tcp/tcp_lane.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "base/errors.h"

namespace comm_core {

namespace {

constexpr int kTries = 20;

}  // namespace

TcpLane::TcpLane(Fd fd, std::string peer, const Watching& watching)
    : Lane(std::move(peer)),
      fd_(std::move(fd)),
      watched_(watching.poller, fd_.get(), watching.watch, watching.watcher) {}

size_t TcpLane::write(const iovec* parts, int num_parts) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = size_t(num_parts);
  for (;;) {
    const ssize_t sent = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return size_t(sent);
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) throw PeerLostError("lost " + peer() + ": " + strerror(errno));
  }
}

size_t TcpLane::read(void* data, size_t bytes) {
  for (;;) {
    const ssize_t got = recv(fd_.get(), data, bytes, MSG_DONTWAIT);
    if (got > 0) return size_t(got);
    if (got == 0) {
      if (bytes == 0) return 0;
      throw PeerLostError("lost " + peer() + ": it closed the connection");
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) throw PeerLostError("lost " + peer() + ": " + strerror(errno));
  }
}

void TcpLane::wake_from(size_t bytes) {
  if (bytes == low_water_) return;
  const int wanted = int(bytes);
  if (setsockopt(fd_.get(), SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted) != 0) {
    throw_errno("SO_RCVLOWAT");
  }
  low_water_ = bytes;
}

void TcpLane::limit_unsent(size_t bytes) {
  unsent_ = bytes;
  const int most = int(bytes);
  if (setsockopt(fd_.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &most, sizeof most) != 0) {
    throw_errno("TCP_NOTSENT_LOWAT");
  }
}

ConnectingLane::ConnectingLane(const LaneTarget& target, const SocketOptions& options,
                               const Watching& watching)
    : TcpLane(target.peer),
      target_(target),
      options_(options),
      watching_(watching),
      tries_left_(kTries) {
  hello_.from = target.name.from;
  hello_.to = target.name.to;
  hello_.kind = target.name.kind;
  hello_.group = target.name.group;
  begin();
}

void ConnectingLane::begin() {
  const int family = target_.address.storage.ss_family;
  ignore();
  fd_ = Fd(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd_) throw_errno("socket");
  tune_socket(fd_.get(), options_, vanished_s(target_.name.kind));
  if (unsent_ > 0) limit_unsent(unsent_);
  state_ = State::connecting;
  done_ = 0;
  random_bytes(hello_.nonce.data(), hello_.nonce.size());
  if (connect(fd_.get(), target_.address.get(), target_.address.length) != 0 &&
      errno != EINPROGRESS) {
    throw PeerLostError("cannot connect to " + peer() + ": " + strerror(errno));
  }
  watched_ = Watched(watching_.poller, fd_.get(), watching_.watch, watching_.watcher);
}

bool ConnectingLane::ready() {
  while (state_ != State::ready) {
    try {
      return advance();
    } catch (const PeerLostError&) {
      if (nobody_there_ || --tries_left_ == 0) throw;
      begin();
    }
  }
  return true;
}

bool ConnectingLane::advance() {
  if (state_ == State::connecting) {
    Address remote;
    remote.length = sizeof remote.storage;
    if (getpeername(fd_.get(), remote.get(), &remote.length) != 0) {
      int error = 0;
      socklen_t length = sizeof error;
      getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      if (error == 0 || error == EINPROGRESS) return false;
      nobody_there_ = error != ECONNRESET;
      throw PeerLostError("cannot connect to " + peer() + ": " + strerror(error));
    }
    state_ = State::greeting;
  }
  if (state_ == State::greeting) {
    if (!flush(&hello_, sizeof hello_, done_)) return false;
    state_ = State::challenged;
  }
  if (state_ == State::challenged) {
    if (!fill(challenge_.data(), challenge_.size(), done_)) return false;
    proof_ = proof(target_.secret, 'c', hello_, challenge_);
    state_ = State::proving;
  }
  if (state_ == State::proving) {
    if (!flush(proof_.data(), proof_.size(), done_)) return false;
    state_ = State::doubting;
  }
  if (state_ == State::doubting) {
    if (!fill(answer_.data(), answer_.size(), done_)) return false;
    if (!equal_constant_time(answer_, proof(target_.secret, 's', hello_, challenge_))) {
      throw MismatchError(peer() + " does not know the job's secret");
    }
    state_ = State::ready;
  }
  return true;
}

}  // namespace comm_core
