// Shared memory: a file that is mapped as long as this lives.
#pragma once

#include <cstddef>
#include <string>

#include "tcp/socket.h"

namespace comm_core {

class Mapping {
 public:
  Mapping() = default;
  // Throws SystemError, which names `what`.
  Mapping(const Fd& fd, size_t bytes, const std::string& what);
  // A new file of `bytes`, all of it backed by memory. Throws SystemError if there is too little.
  static Mapping create(const std::string& path, size_t bytes);
  // The whole of an existing file. Throws SystemError.
  static Mapping open(const std::string& path);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// "/dev/shm/comm_core-<user>-<random>": a name that nobody else has.
std::string unique_path();

}  // namespace comm_core
