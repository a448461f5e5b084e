// Memory that other processes of this host can map: inputs and outputs there need no staging.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "shm/segment.h"

namespace comm_core {

// Where a piece of memory is, in words that another process understands.
struct BufferPlace {
  int32_t pid = 0;  // 0: nowhere
  int32_t fd = -1;  // of that process
  uint64_t id = 0;  // stands at the buffer's end too: a descriptor number may be used again
  uint64_t bytes = 0;
  uint64_t offset = 0;
};

// The buffers of this process. Thread-safe; one per process.
class SharedBuffers {
 public:
  static SharedBuffers& instance();

  // Zeroed memory, aligned to a page. Throws SystemError.
  char* allocate(size_t bytes);
  void free(char* data);
  // The place of [data, data + bytes) if it lies within one buffer.
  std::optional<BufferPlace> find(const char* data, size_t bytes);

 private:
  struct Buffer {
    Fd fd;
    size_t bytes;     // as asked for
    Mapping mapping;  // with the identity behind it
    uint64_t id;
  };
  std::mutex mutex_;
  std::map<const char*, Buffer> buffers_;
};

// Buffers of other processes, mapped here when first needed.
class PeerBuffers {
 public:
  // Null if it cannot be mapped: another user's, another container's, or gone.
  char* map(const BufferPlace& place);

 private:
  struct Mapped {
    BufferPlace place;
    Mapping mapping;
  };
  static constexpr size_t kMost = 64;
  std::list<Mapped> mapped_;  // the last used first
};

}  // namespace comm_core
