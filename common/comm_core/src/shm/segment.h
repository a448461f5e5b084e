// Memory segments that processes of one host share. A segment has no name: the kernel frees it when
// the processes have ended, in whatever way, and the size of /dev/shm does not limit it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "io/fd.h"

namespace comm_core {

// Reference to a descriptor of a process, which other processes of the same host and user can open.
struct RemoteFd {
  int pid = 0;
  int fd = -1;

  // Returns the reference to a descriptor of this process.
  static RemoteFd of(const Fd& fd);
  // Opens the descriptor's file again. Throws SystemError if the process belongs to another user or
  // container, or has ended.
  Fd open(int flags) const;
};

// Mapping of a file, which it owns: the pages are unmapped on destruction.
class Mapping {
 public:
  Mapping() = default;
  // Maps `bytes` bytes of `fd`. Throws SystemError, whose text names `what`.
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

// Description of a segment: `bytes` bytes, the last 8 of which hold its random identity `id`.
struct Segment {
  RemoteFd place;
  uint64_t id = 0;
  size_t bytes = 0;
};

// Makes a segment of at least `bytes` zero bytes and returns its mapping, its descriptor in `fd`
// and its description in `made`. If `now`, all pages are allocated at once, otherwise on first use.
// The caller must keep `fd` open until all others have opened it. Throws SystemError if there is
// too little memory.
Mapping make_segment(size_t bytes, bool now, Fd& fd, Segment& made);
// Maps the segment of another process. Throws SystemError if its size or identity differs.
Mapping open_segment(const Segment& segment);
// Returns whether the mapped segment has this identity. `disown` removes it, for all processes.
bool is(const Mapping& mapping, uint64_t id);
// Releases the memory of the segment. The mappings stay valid and read zeros.
void disown(const Mapping& mapping, const Fd& fd);

}  // namespace comm_core
