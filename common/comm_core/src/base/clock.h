// The one clock of the core: monotonic, so that it can be compared with Python's time.monotonic().
#pragma once

#include <time.h>

namespace comm_core {

inline double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

}  // namespace comm_core
