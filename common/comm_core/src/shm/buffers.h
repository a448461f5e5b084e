// Memory that other processes of this host can map: inputs and outputs there need no staging.
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

// Where a piece of memory is, in words that another process understands.
struct BufferPlace {
  Segment segment;  // of process 0: nowhere
  uint64_t offset = 0;
};

// The buffers of this process. Thread-safe; one per process.
class SharedBuffers {
 public:
  static SharedBuffers& instance();

  // Zeroed memory, aligned to a page. Throws SystemError.
  char* allocate(size_t bytes);
  // Its memory is given back, also where peers have it mapped.
  void free(char* data);
  // The place of [data, data + bytes) if it lies within one buffer.
  std::optional<BufferPlace> find(const char* data, size_t bytes);

 private:
  struct Buffer {
    Fd fd;
    size_t bytes;  // as asked for
    Mapping mapping;
    Segment segment;
  };
  std::mutex mutex_;
  std::map<const char*, Buffer> buffers_;
};

// Buffers of other processes, mapped here when first needed. Thread-safe; one per process.
class PeerBuffers {
 public:
  static PeerBuffers& instance();

  // The memory at `place`, which stays mapped as long as the result is held. Null if it cannot be
  // mapped: another user's, another container's, or freed.
  std::shared_ptr<char> map(const BufferPlace& place);
  // Bytes of what is mapped, in use or not.
  size_t mapped_bytes();

 private:
  struct Mapped {
    uint64_t id;
    std::shared_ptr<Mapping> mapping;
  };
  using Place = std::list<Mapped>::iterator;
  void forget(Place place);
  void forget_some();

  // What its owner has freed takes no memory, only addresses.
  static constexpr size_t kMostBytes = size_t(16) << 30;
  std::mutex mutex_;
  std::list<Mapped> mapped_;  // the last used first
  std::unordered_map<uint64_t, Place> by_id_;
  size_t bytes_ = 0;
};

}  // namespace comm_core
