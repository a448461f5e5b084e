// File descriptors. A forked child has none of its parent's: what it kept open would hide its
// parent's end from the others, and what it did with them would be done to its parent.
#pragma once

#include <cstdint>
#include <utility>

namespace comm_core {

// A number that a forked child has otherwise than its parent.
uint32_t forks();

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
  // -1 also in a child of the process that opened it.
  int get() const { return forks_ == forks() ? fd_ : -1; }
  explicit operator bool() const { return get() >= 0; }

 private:
  int fd_ = -1;
  uint32_t forks_ = 0;
};

}  // namespace comm_core
