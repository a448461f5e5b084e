#include "engine/flight.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/errors.h"
#include "engine/queue.h"

namespace comm_core {
namespace {

constexpr size_t kSlots = 1024, kBytes = kSlots * sizeof(FlightSlot);
static_assert(sizeof(FlightSlot) == 128);

std::atomic<uint64_t> last_record{0};

// Maps the ring at `at` (null: anywhere), in place of what is there. `file`: -1 for none.
FlightSlot* map_ring(void* at, int file) {
  const int flags = (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED) | (at ? MAP_FIXED : 0);
  void* const ring = mmap(at, kBytes, PROT_READ | PROT_WRITE, flags, file, 0);
  if (ring == MAP_FAILED) throw_errno("flight recorder: mmap");
  return static_cast<FlightSlot*>(ring);
}

// Its address stays the same, so that operations in flight may write while the file changes.
FlightSlot* ring() {
  static FlightSlot* const slots = map_ring(nullptr, -1);
  return slots;
}

// Writes what another thread may write, too, after 1024 operations.
template <typename T>
void put(T& at, T value) {
  std::atomic_ref<T>(at).store(value, std::memory_order_release);
}

}  // namespace

void record_flight(const std::string& path) {
  FlightSlot* const slots = ring();
  if (path.empty()) {
    map_ring(slots, -1);
    return;
  }
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) throw_errno("flight recorder: " + path);
  // A write into a mapped page for which the disk has no room would end the process.
  const int error = posix_fallocate(file, 0, kBytes);
  if (error == 0) map_ring(slots, file);
  close(file);
  errno = error;
  if (error != 0) throw_errno("flight recorder: " + path);
  last_record = 0;
}

void FlightEntry::note(const Op& op) {
  const OpSpec& spec = op.spec();
  record_ = ++last_record;
  slot_ = ring() + record_ % kSlots;
  put(slot_->record, uint64_t(0));
  slot_->group = op.queue().number();
  slot_->sequence = op.sequence();
  slot_->input_bytes = total(spec.inputs);
  slot_->output_bytes = total(spec.outputs);
  slot_->input_at = spec.inputs.empty() ? 0 : uint64_t(spec.inputs[0].data);
  slot_->output_at = spec.outputs.empty() ? 0 : uint64_t(spec.outputs[0].data);
  slot_->created_s = op.times().enqueued_s;
  put(slot_->started_s, 0.0);
  put(slot_->finished_s, 0.0);
  slot_->peer = point_to_point(spec.kind) ? spec.peer : spec.root;
  put(slot_->failed, 0);
  strncpy(slot_->operation, name(spec.kind), sizeof slot_->operation - 1);
  strncpy(slot_->dtype, name(spec.dtype), sizeof slot_->dtype - 1);
  put(slot_->record, record_);
}

bool FlightEntry::kept() const {
  return slot_ != nullptr && std::atomic_ref<uint64_t>(slot_->record).load() == record_;
}

void FlightEntry::started(double at_s) {
  if (kept()) put(slot_->started_s, at_s);
}

void FlightEntry::finished(double at_s, bool failed) {
  if (!kept()) return;
  put(slot_->failed, int32_t(failed));
  put(slot_->finished_s, at_s);
}

}  // namespace comm_core
