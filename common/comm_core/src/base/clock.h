// The one clock of the core: monotonic, so that it can be compared with Python's time.monotonic().
#pragma once

#include <time.h>

#include <limits>

namespace comm_core {

// When what has no deadline is due.
constexpr double kNever = std::numeric_limits<double>::infinity();

inline double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

}  // namespace comm_core
