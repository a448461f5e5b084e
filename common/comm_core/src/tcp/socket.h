// Makes and configures TCP sockets.
#pragma once

#include "io/fd.h"
#include "transport/device.h"
#include "transport/socket_options.h"

namespace comm_core {

// Returns a listening, non-blocking socket on `address`. If the port is 0, the system chooses one,
// which is stored in `address`. Accepted connections inherit the buffer sizes of `options`. Throws
// SystemError.
Fd listen_on(Address& address, const SocketOptions& options);

// Returns for how many seconds sent bytes of such a lane may remain unacknowledged before the peer
// counts as lost. 0: no limit.
double vanished_s(LaneKind kind);

// Sets TCP_NODELAY, keep-alive, the limit `vanished_s` (see above) and the `options`. Throws
// SystemError, for example if the congestion control is not available.
void tune_socket(int fd, const SocketOptions& options, double vanished_s);

}  // namespace comm_core
