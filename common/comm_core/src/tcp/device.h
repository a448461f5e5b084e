// Device whose lanes are TCP connections.
#pragma once

#include <memory>
#include <string>

#include "transport/device.h"
#include "transport/socket_options.h"

namespace comm_core {

// Returns a device that listens at `host`, a numeric address of this host, on a port that the
// system chooses. `poller` must outlive it. Throws InvalidRequestError if `host` is not numeric,
// SystemError.
std::unique_ptr<Device> tcp_device(Poller& poller, const std::string& host,
                                   const SocketOptions& options);

}  // namespace comm_core
