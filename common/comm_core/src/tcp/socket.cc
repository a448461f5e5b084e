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

// Must be called before the connection is made. The peer sizes its segments by the largest window
// that was ever advertised to it. If the window shrinks later, no segment fits any more and the
// peer sends only the window probes of its kernel: a few kilobytes every 200 ms.
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
  // The connector sends first, so the kernel need not report connections that send nothing.
  set_option(fd.get(), IPPROTO_TCP, TCP_DEFER_ACCEPT, 5);
  if (listen(fd.get(), 1024) != 0) throw_errno("listen " + address.text());
  if (getsockname(fd.get(), address.get(), &address.length) != 0) throw_errno("getsockname");
  return fd;
}

double vanished_s(LaneKind kind) {
  // Every live process reads the few bytes of a control lane at once. Unread data is no sign of a
  // dead peer: the sender may just be ahead.
  return kind == LaneKind::control ? 10 : 0;
}

void tune_socket(int fd, const SocketOptions& options, double vanished_s) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  // Keep-alive probes detect a host that has disappeared within about 10 s.
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 5);
  // The kernel sends no keep-alive probes while sent data is unacknowledged.
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
