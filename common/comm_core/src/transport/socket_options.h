// Options of a device's connections that a user may set.
#pragma once

#include <string>

namespace comm_core {

struct SocketOptions {
  std::string congestion;  // congestion control; empty: the default of the system
  int send_buffer = 0;     // bytes; 0: the size that the system chooses, which grows as needed
  int receive_buffer = 0;  // the same
};

}  // namespace comm_core
