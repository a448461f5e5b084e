#include "shm/buffers.h"

#include <iterator>

#include "base/errors.h"

namespace comm_core {

SharedBuffers& SharedBuffers::instance() {
  // Never destroyed, because tensors may be freed after static objects are destroyed.
  static SharedBuffers* buffers = new SharedBuffers;
  return *buffers;
}

char* SharedBuffers::allocate(size_t bytes) {
  Buffer buffer{{}, bytes, {}, {}};
  buffer.mapping = make_segment(bytes, false, buffer.fd, buffer.segment);
  char* const data = buffer.mapping.data();
  std::lock_guard<std::mutex> lock(mutex_);
  buffers_[data] = std::move(buffer);
  return data;
}

void SharedBuffers::free(char* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = buffers_.find(data);
  if (found == buffers_.end()) return;
  // A forked child has no descriptor. The parent still owns the memory, so it is not released.
  if (found->second.fd) disown(found->second.mapping, found->second.fd);
  buffers_.erase(found);
}

std::optional<BufferPlace> SharedBuffers::find(const char* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = buffers_.upper_bound(data);
  if (found == buffers_.begin()) return std::nullopt;
  --found;
  const Buffer& buffer = found->second;
  const size_t offset = size_t(data - found->first);
  if (offset + bytes > buffer.bytes || !buffer.fd) return std::nullopt;
  return BufferPlace{buffer.segment, offset};
}

PeerBuffers& PeerBuffers::instance() {
  // Never destroyed, for the same reason.
  static PeerBuffers* buffers = new PeerBuffers;
  return *buffers;
}

std::shared_ptr<char> PeerBuffers::map(const BufferPlace& place) {
  const uint64_t id = place.segment.id;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = by_id_.find(id);
  if (known != by_id_.end()) {
    if (!is(*known->second->mapping, id)) {
      forget(known->second);
      return nullptr;
    }
    mapped_.splice(mapped_.begin(), mapped_, known->second);
  } else {
    try {
      mapped_.push_front({id, std::make_shared<Mapping>(open_segment(place.segment))});
    } catch (const SystemError&) {
      return nullptr;
    }
    by_id_[id] = mapped_.begin();
    bytes_ += place.segment.bytes;
    forget_some();
  }
  const std::shared_ptr<Mapping>& mapping = mapped_.front().mapping;
  return std::shared_ptr<char>(mapping, mapping->data() + place.offset);
}

size_t PeerBuffers::mapped_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

// Users of the mapping hold a reference, which keeps it mapped.
void PeerBuffers::forget(Place place) {
  bytes_ -= place->mapping->bytes();
  by_id_.erase(place->id);
  mapped_.erase(place);
}

// Unmaps buffers that their owners have freed, and beyond kMostBytes those not in use. Keeps the
// most recently used one.
void PeerBuffers::forget_some() {
  for (auto it = std::next(mapped_.begin()); it != mapped_.end();) {
    const Place place = it++;
    if (!is(*place->mapping, place->id)) forget(place);
  }
  for (auto it = mapped_.end(); bytes_ > kMostBytes && --it != mapped_.begin();) {
    if (it->mapping.use_count() == 1) forget(it++);
  }
}

}  // namespace comm_core
