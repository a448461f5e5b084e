// Sockets with the options that their use asks for.
#pragma once

#include "base/fd.h"
#include "transport/device.h"
#include "transport/socket_options.h"

namespace comm_core {

// A listening, non-blocking socket on `address`; the port is chosen by the system if 0. What it
// accepts has the buffers that `options` asks for.
Fd listen_on(Address& address, const SocketOptions& options);

// So long a peer may leave bytes of such a lane unanswered before it is gone; 0: as long as it
// likes.
double vanished_s(LaneKind kind);

// TCP_NODELAY, keep-alive, and what `options` asks for. Throws SystemError if a congestion control
// is not to be had.
void tune_socket(int fd, const SocketOptions& options, double vanished_s);

}  // namespace comm_core
