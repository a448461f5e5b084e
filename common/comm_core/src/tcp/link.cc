#include "tcp/link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace comm_core {

size_t Link::write(const iovec* parts, int num_parts) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = size_t(num_parts);
  for (;;) {
    const ssize_t sent = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return size_t(sent);
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) throw PeerLostError("lost " + peer_ + ": " + strerror(errno));
  }
}

size_t Link::write(const void* data, size_t bytes) {
  const iovec part{const_cast<void*>(data), bytes};
  return write(&part, 1);
}

size_t Link::read(void* data, size_t bytes) {
  for (;;) {
    const ssize_t got = recv(fd_.get(), data, bytes, MSG_DONTWAIT);
    if (got > 0) return size_t(got);
    if (got == 0) {
      if (bytes == 0) return 0;
      throw PeerLostError("lost " + peer_ + ": it closed the connection");
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) throw PeerLostError("lost " + peer_ + ": " + strerror(errno));
  }
}

void Link::set_low_water(size_t bytes) {
  const int wanted = int(bytes);
  if (wanted == low_water_) return;
  if (setsockopt(fd_.get(), SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted) != 0) {
    throw_errno("SO_RCVLOWAT");
  }
  low_water_ = wanted;
}

void Link::limit_unsent(size_t bytes) {
  const int most = int(bytes);
  if (setsockopt(fd_.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &most, sizeof most) != 0) {
    throw_errno("TCP_NOTSENT_LOWAT");
  }
}

bool Link::flush(const void* data, size_t bytes, size_t& done) {
  while (done < bytes) {
    const size_t sent = write(static_cast<const char*>(data) + done, bytes - done);
    if (sent == 0) return false;
    done += sent;
  }
  done = 0;
  return true;
}

bool Link::fill(void* data, size_t bytes, size_t& done) {
  while (done < bytes) {
    const size_t got = read(static_cast<char*>(data) + done, bytes - done);
    if (got == 0) return false;
    done += got;
  }
  done = 0;
  return true;
}

bool InLink::expect(FrameHeader mine, uint64_t bytes) {
  if (!fill(&header_, sizeof header_, have_)) return false;
  mine.payload_bytes = bytes;
  check_header(mine, header_, peer_);
  return true;
}

OutLink::OutLink(const LinkTarget& target) : Link(Fd(), target.peer), target_(target) {
  const int family = target_.address.storage.ss_family;
  fd_ = Fd(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd_) throw_errno("socket");
  tune_socket(fd_.get(), target_.options);
  random_bytes(target_.hello.nonce.data(), target_.hello.nonce.size());
  if (connect(fd_.get(), target_.address.get(), target_.address.length) != 0 &&
      errno != EINPROGRESS) {
    throw PeerLostError("cannot connect to " + peer_ + ": " + strerror(errno));
  }
}

bool OutLink::ready() {
  if (state_ == State::ready) return true;
  if (state_ == State::connecting) {
    Address remote;
    remote.length = sizeof remote.storage;
    if (getpeername(fd_.get(), remote.get(), &remote.length) != 0) {
      int error = 0;
      socklen_t length = sizeof error;
      getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      if (error == 0 || error == EINPROGRESS) return false;
      throw PeerLostError("cannot connect to " + peer_ + ": " + strerror(error));
    }
    state_ = State::greeting;
  }
  if (state_ == State::greeting) {
    if (!flush(&target_.hello, sizeof target_.hello, done_)) return false;
    state_ = State::challenged;
  }
  if (state_ == State::challenged) {
    if (!fill(challenge_.data(), challenge_.size(), done_)) return false;
    proof_ = proof(target_.secret, 'c', target_.hello, challenge_);
    state_ = State::proving;
  }
  if (state_ == State::proving) {
    if (!flush(proof_.data(), proof_.size(), done_)) return false;
    state_ = State::doubting;
  }
  if (state_ == State::doubting) {
    if (!fill(answer_.data(), answer_.size(), done_)) return false;
    if (!equal_constant_time(answer_, proof(target_.secret, 's', target_.hello, challenge_))) {
      throw PeerLostError(peer_ + " does not know the job's secret");
    }
    state_ = State::ready;
  }
  return true;
}

}  // namespace comm_core
