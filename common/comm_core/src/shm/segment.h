// Memory that processes of one host share. It has no name: however they end, nothing is left of it,
// and the size of /dev/shm does not limit it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/fd.h"

namespace comm_core {

// How another process of this host and user comes to a descriptor.
struct RemoteFd {
  int pid = 0;
  int fd = -1;

  static RemoteFd of(const Fd& fd);
  // Opens the same thing anew. Throws SystemError: another user's, another container's, or gone.
  Fd open(int flags) const;
};

// Pages that stay mapped as long as this lives.
class Mapping {
 public:
  Mapping() = default;
  // Throws SystemError, which names `what`.
  Mapping(const Fd& fd, size_t bytes, const std::string& what);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// `bytes` of zeros, and behind them what tells them from any other memory.
struct Segment {
  RemoteFd place;
  uint64_t id = 0;
  size_t bytes = 0;
};

// Makes one; all of it is backed by memory where `now`, else when it is touched. The descriptor is
// needed until all others have opened it. Throws SystemError if there is too little.
Mapping make_segment(size_t bytes, bool now, Fd& fd, Segment& made);
// Maps another process's. Throws SystemError if it is not that one.
Mapping open_segment(const Segment& segment);
// Whether it is still the one with this identity: `disown` makes it another, for all who have it.
bool is(const Mapping& mapping, uint64_t id);
// Gives its memory back, which takes nobody's addresses away.
void disown(const Mapping& mapping, const Fd& fd);

}  // namespace comm_core
