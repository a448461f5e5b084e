#include "shm/buffers.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "base/errors.h"
#include "tcp/wire.h"

namespace comm_core {

namespace {

size_t whole_pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

SharedBuffers& SharedBuffers::instance() {
  // Never destroyed: tensors may outlive every static order.
  static SharedBuffers* buffers = new SharedBuffers;
  return *buffers;
}

char* SharedBuffers::allocate(size_t bytes) {
  // A file in memory without a name: nothing is left behind, however the process ends.
  Fd fd(memfd_create("comm_core", MFD_CLOEXEC));
  if (!fd) throw_errno("memfd_create");
  const size_t mapped = whole_pages(bytes + sizeof(uint64_t));
  if (ftruncate(fd.get(), off_t(mapped)) != 0) throw_errno("ftruncate");
  Mapping mapping(fd, mapped, std::to_string(mapped) + " shared bytes");
  char* const data = mapping.data();
  uint64_t id = 0;
  random_bytes(&id, sizeof id);
  memcpy(data + mapped - sizeof id, &id, sizeof id);
  std::lock_guard<std::mutex> lock(mutex_);
  buffers_[data] = {std::move(fd), bytes, std::move(mapping), id};
  return data;
}

void SharedBuffers::free(char* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  buffers_.erase(data);
}

std::optional<BufferPlace> SharedBuffers::find(const char* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = buffers_.upper_bound(data);
  if (found == buffers_.begin()) return std::nullopt;
  --found;
  const Buffer& buffer = found->second;
  const size_t offset = size_t(data - found->first);
  if (offset + bytes > buffer.bytes) return std::nullopt;
  return BufferPlace{int32_t(getpid()), buffer.fd.get(), buffer.id, buffer.mapping.bytes(), offset};
}

char* PeerBuffers::map(const BufferPlace& place) {
  for (auto it = mapped_.begin(); it != mapped_.end(); ++it) {
    if (it->place.pid == place.pid && it->place.id == place.id) {
      mapped_.splice(mapped_.begin(), mapped_, it);
      return mapped_.front().mapping.data() + place.offset;
    }
  }
  const std::string path = "/proc/" + std::to_string(place.pid) + "/fd/" + std::to_string(place.fd);
  Fd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd || place.bytes < sizeof(uint64_t)) return nullptr;
  if (lseek(fd.get(), 0, SEEK_END) != off_t(place.bytes)) return nullptr;
  try {
    Mapping mapping(fd, place.bytes, path);
    uint64_t id = 0;
    memcpy(&id, mapping.data() + place.bytes - sizeof id, sizeof id);
    if (id != place.id) return nullptr;
    mapped_.push_front({place, std::move(mapping)});
  } catch (const SystemError&) {
    return nullptr;
  }
  if (mapped_.size() > kMost) mapped_.pop_back();
  return mapped_.front().mapping.data() + place.offset;
}

}  // namespace comm_core
