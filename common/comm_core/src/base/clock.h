// Monotonic clock that all of the core uses. Python's time.monotonic() reads the same clock, so
// that times of both can be compared.
#pragma once

#include <time.h>

#include <limits>

namespace comm_core {

// Deadline of an operation without a deadline, in seconds.
constexpr double kNever = std::numeric_limits<double>::infinity();

// Returns the monotonic time in seconds.
inline double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

}  // namespace comm_core
