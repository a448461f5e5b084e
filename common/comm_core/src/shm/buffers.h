// Shared buffers: memory that other processes of this host can map. Collectives read and write it
// in place, without copies through slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "shm/segment.h"

namespace comm_core {

// Location of memory in a form that another process can use.
struct BufferPlace {
  Segment segment;      // pid 0: no location
  uint64_t offset = 0;  // bytes
};

// The shared buffers of this process, which it owns. Thread-safe; one instance per process.
class SharedBuffers {
 public:
  static SharedBuffers& instance();

  // Returns a new buffer of zeros, aligned to a page. The caller must `free` it. Throws
  // SystemError.
  char* allocate(size_t bytes);
  // Frees the buffer at `data`. Its memory is released even if peers still have it mapped.
  void free(char* data);
  // Returns the location of [data, data + bytes), or nothing if it does not lie within one buffer.
  std::optional<BufferPlace> find(const char* data, size_t bytes);

 private:
  struct Buffer {
    Fd fd;
    size_t bytes;  // as requested
    Mapping mapping;
    Segment segment;
  };
  std::mutex mutex_;
  std::map<const char*, Buffer> buffers_;
};

// Shared buffers of other processes, mapped on first use and kept mapped. Thread-safe; one instance
// per process.
class PeerBuffers {
 public:
  static PeerBuffers& instance();

  // Returns the memory at `place`, which stays mapped while the result is held. Returns null if it
  // cannot be mapped: it belongs to another user or container, or was freed.
  std::shared_ptr<char> map(const BufferPlace& place);
  // Returns the mapped bytes, including those that are not in use.
  size_t mapped_bytes();

 private:
  struct Mapped {
    uint64_t id;
    std::shared_ptr<Mapping> mapping;
  };
  using Place = std::list<Mapped>::iterator;
  void forget(Place place);
  void forget_some();

  // Mapped buffers that are not in use are unmapped beyond this size.
  static constexpr size_t kMostBytes = size_t(16) << 30;
  std::mutex mutex_;
  std::list<Mapped> mapped_;  // most recently used first
  std::unordered_map<uint64_t, Place> by_id_;
  size_t bytes_ = 0;
};

}  // namespace comm_core
