// What a user may set of a device's connections.
#pragma once

#include <string>

namespace comm_core {

struct SocketOptions {
  std::string congestion;  // congestion control; empty: the system's
  int send_buffer = 0;     // bytes; 0: the system's, which grows by itself
  int receive_buffer = 0;
};

}  // namespace comm_core
