// Lanes over TCP.
#pragma once

#include <memory>
#include <string>

#include "transport/device.h"
#include "transport/socket_options.h"

namespace comm_core {

// Listens at the address of this host, at a port that the system chooses. Throws SystemError,
// InvalidRequestError.
std::unique_ptr<Device> tcp_device(Poller& poller, const std::string& host,
                                   const SocketOptions& options);

}  // namespace comm_core
