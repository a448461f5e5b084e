#include "tcp/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "base/errors.h"

namespace comm_core {

namespace {

void set_option(int fd, int level, int option, int value) {
  if (setsockopt(fd, level, option, &value, sizeof value) != 0) throw_errno("setsockopt");
}

// Before the connection is made: the peer remembers the largest window it was ever shown and sizes
// its segments by it. After a window that shrank, it has none that fit and sends only what the
// kernel's window probe lets out, a few kilobytes every 200 ms.
void set_buffers(int fd, const SocketOptions& options) {
  if (options.send_buffer > 0) set_option(fd, SOL_SOCKET, SO_SNDBUF, options.send_buffer);
  if (options.receive_buffer > 0) set_option(fd, SOL_SOCKET, SO_RCVBUF, options.receive_buffer);
}

}  // namespace

Fd listen_on(Address& address, const SocketOptions& options) {
  const int family = address.storage.ss_family;
  Fd fd(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) throw_errno("socket");
  set_buffers(fd.get(), options);
  if (bind(fd.get(), address.get(), address.length) != 0) throw_errno("bind " + address.text());
  // Who connects speaks first: the kernel keeps silent strangers to itself.
  set_option(fd.get(), IPPROTO_TCP, TCP_DEFER_ACCEPT, 5);
  if (listen(fd.get(), 1024) != 0) throw_errno("listen " + address.text());
  if (getsockname(fd.get(), address.get(), &address.length) != 0) throw_errno("getsockname");
  return fd;
}

double vanished_s(LaneKind kind) {
  // Its few bytes are read at once by any process that lives. Of data that nobody reads yet, as of
  // a rank that is ahead, the same says nothing.
  return kind == LaneKind::control ? 10 : 0;
}

void tune_socket(int fd, const SocketOptions& options, double vanished_s) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  // A host that vanished without a word is noticed within about 10 s.
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 5);
  // While something is on its way, it is asked for no sign of life.
  if (vanished_s > 0) {
    set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, int(vanished_s * 1e3));
  }
  set_buffers(fd, options);
  if (!options.congestion.empty() &&
      setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, options.congestion.c_str(),
                 socklen_t(options.congestion.size())) != 0) {
    throw_errno("congestion control '" + options.congestion + "'");
  }
}

}  // namespace comm_core
