// File descriptors. A forked child closes all descriptors of its parent. If the child kept a
// connection open, peers would not notice the end of the parent, and reads and writes of the child
// would disturb the parent's connection.
#pragma once

#include <cstdint>
#include <utility>

namespace comm_core {

// Returns the fork counter: a forked child has a higher number than its parent. Counting begins
// with the first Fd.
uint32_t forks();

// Owns a descriptor and closes it on destruction.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd);
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), forks_(other.forks_) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
      forks_ = other.forks_;
    }
    return *this;
  }
  ~Fd() { reset(); }
  void reset();
  // Returns -1 if empty, and in a forked child of the process that opened the descriptor.
  int get() const { return forks_ == forks() ? fd_ : -1; }
  explicit operator bool() const { return get() >= 0; }

 private:
  int fd_ = -1;
  uint32_t forks_ = 0;
};

}  // namespace comm_core
