#include "shm/streams.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/errors.h"
#include "base/text.h"

namespace comm_core {

namespace {

constexpr size_t kLine = 128;  // two cache lines, because the processor fetches them in pairs

// Slot sizes: one that stays in the cache of a core, and one for more ranks than processors, where
// every round may need a context switch.
constexpr size_t kSlot = 256 << 10, kSharedCoreSlot = 1 << 20;
// The larger slots take at most 1/16 of the free memory, to leave room for later groups.
constexpr size_t kModestPart = 16;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// First byte of a store value that holds the reason of a failure.
constexpr char kFailed = '!';

// Slot size if memory is short or this process has many groups, for example one per stream.
constexpr size_t kLeastSlot = 64 << 10;
constexpr int kSeveral = 8, kMany = 64;
std::atomic<int> live_groups{0};

SystemError malformed(const std::string& told) {
  return SystemError("malformed store entry '" + told + "'");
}

}  // namespace

struct ShmStreams::Facts {
  alignas(kLine) std::atomic<uint32_t> asleep;
  std::atomic<uint32_t> gone;  // 1: has left, 2: has failed
};

ShmStreams::ShmStreams(Store& store, const std::vector<int>& ranks, int me, size_t slot_bytes)
    : n_(int(ranks.size())),
      me_(me),
      written_(size_t(2 * n_)),
      read_(size_t(2 * n_)),
      free_from_(size_t(2 * n_)) {
  const std::string key = "shm" + std::to_string(ranks[0]);
  if (me_ == 0) {
    make(store, key, slot_bytes);
  } else {
    const std::string told = store.get(key);
    if (told[0] == kFailed) throw SystemError(told.substr(1));
    Segment segment;
    if (!read_numbers(told, slot_bytes, segment.place.pid, segment.place.fd, segment.id,
                      segment.bytes)) {
      throw malformed(told);
    }
    lay_out(slot_bytes);
    if (segment.bytes < total_) throw malformed(told);
    mapping_ = open_segment(segment);
  }
  int ends[2];
  if (pipe2(ends, O_NONBLOCK | O_CLOEXEC) != 0) throw_errno("cannot make the doorbell pipe");
  bell_ = Fd(ends[0]);
  ring_ = Fd(ends[1]);
  const RemoteFd ring = RemoteFd::of(ring_);
  store.set("bell" + std::to_string(ranks[size_t(me_)]),
            std::to_string(ring.pid) + " " + std::to_string(ring.fd));
  ++live_groups;
}

// Makes the segment, on the first rank.
void ShmStreams::make(Store& store, const std::string& key, size_t slot_bytes) {
  Segment segment;
  try {
    lay_out(slot_bytes > 0 ? slot_bytes : choose_slot());
    try {
      mapping_ = make_segment(total_, true, memory_, segment);
    } catch (const SystemError&) {
      if (slot_bytes > 0) throw;
      lay_out(kLeastSlot);
      mapping_ = make_segment(total_, true, memory_, segment);
    }
  } catch (const SystemError& error) {
    store.set(key, kFailed + std::string(error.what()));
    throw;
  }
  store.set(key, std::to_string(slot_bytes_) + " " + std::to_string(segment.place.pid) + " " +
                     std::to_string(segment.place.fd) + " " + std::to_string(segment.id) + " " +
                     std::to_string(segment.bytes));
}

void ShmStreams::connect(Store& store, const std::vector<int>& ranks) {
  for (int rank : ranks) {
    const std::string told = store.get("bell" + std::to_string(rank));
    if (told[0] == kFailed) throw SystemError(told.substr(1));
    RemoteFd ring;
    if (!read_numbers(told, ring.pid, ring.fd)) throw malformed(told);
    // Opened for reading too: writing to a pipe without a reader raises SIGPIPE.
    bells_.push_back(ring.open(O_RDWR | O_NONBLOCK));
  }
}

ShmStreams::~ShmStreams() { --live_groups; }

size_t ShmStreams::choose_slot() {
  if (live_groups >= kMany) return kLeastSlot;
  if (n_ <= int(std::thread::hardware_concurrency()) || live_groups >= kSeveral) return kSlot;
  lay_out(kSharedCoreSlot);
  const size_t free = size_t(sysconf(_SC_AVPHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
  return free / kModestPart >= total_ ? kSharedCoreSlot : kSlot;
}

void ShmStreams::lay_out(size_t slot_bytes) {
  const size_t n = size_t(n_);
  slot_bytes_ = round_up(slot_bytes, 4096);
  slot_stride_ = round_up(sizeof(SlotHeader) + 8 * n, 64) + slot_bytes_;
  counters_offset_ = n * sizeof(Facts);
  // `published`: one line for each of the 2n streams. `released`: a row of 2n counters per reader.
  const size_t row = round_up(2 * n * 8, kLine);
  slots_offset_ = round_up(counters_offset_ + 2 * n * kLine + n * row, 4096);
  total_ = slots_offset_ + 2 * n * kSlots * slot_stride_;
}

ShmStreams::Slot ShmStreams::slot(int stream, uint64_t round) {
  char* base =
      mapping_.data() + slots_offset_ + (size_t(stream) * kSlots + round % kSlots) * slot_stride_;
  return {reinterpret_cast<SlotHeader*>(base),
          reinterpret_cast<uint64_t*>(base + sizeof(SlotHeader)),
          base + slot_stride_ - slot_bytes_};
}

std::atomic<uint64_t>& ShmStreams::published(int stream) const {
  char* at = mapping_.data() + counters_offset_ + size_t(stream) * kLine;
  return *reinterpret_cast<std::atomic<uint64_t>*>(at);
}

std::atomic<uint64_t>& ShmStreams::released(int reader, int stream) {
  const size_t n = size_t(n_);
  char* rows = mapping_.data() + counters_offset_ + 2 * n * kLine;
  char* at = rows + size_t(reader) * round_up(2 * n * 8, kLine) + size_t(stream) * 8;
  return *reinterpret_cast<std::atomic<uint64_t>*>(at);
}

ShmStreams::Facts& ShmStreams::facts(int r) const {
  return reinterpret_cast<Facts*>(mapping_.data())[r];
}

// The loads here and in `ready` are sequentially consistent: with a weaker order, the last check
// before a sleep could run before the announcement of the sleep.
bool ShmStreams::room(int stream) {
  const uint64_t round = written_[size_t(stream)];
  uint64_t& known = free_from_[size_t(stream)];  // all ranks have released the rounds before it
  if (round < known + kSlots) return true;
  uint64_t least = UINT64_MAX;
  for (int r = 0; r < n_; ++r) {
    if (r != me_) {
      least = std::min(least, released(r, stream).load(std::memory_order_seq_cst));
    }
  }
  known = least;
  return round < known + kSlots;
}

bool ShmStreams::room_of(int r, int stream) {
  return written_[size_t(stream)] < released(r, stream).load(std::memory_order_seq_cst) + kSlots;
}

void ShmStreams::publish(int stream) {
  published(stream).store(++written_[size_t(stream)], std::memory_order_seq_cst);
  for (int r = 0; r < n_; ++r) {
    if (r != me_) wake(r);
  }
}

bool ShmStreams::ready(int stream) const {
  return published(stream).load(std::memory_order_seq_cst) > read_[size_t(stream)];
}

void ShmStreams::release(int stream, uint64_t rounds) {
  read_[size_t(stream)] += rounds;
  released(me_, stream).store(read_[size_t(stream)], std::memory_order_seq_cst);
  wake(stream % n_);
}

void ShmStreams::wake(int r) {
  std::atomic<uint32_t>& asleep = facts(r).asleep;
  if (asleep.load(std::memory_order_seq_cst) != 0 && asleep.exchange(0) != 0) {
    // A failed write to a full pipe is no error: the reader is being woken already.
    (void)!write(bells_[size_t(r)].get(), "", 1);
  }
}

bool ShmStreams::left(int r) const { return facts(r).gone.load() == 1; }

bool ShmStreams::failed(int r) const { return facts(r).gone.load() == 2; }

void ShmStreams::go(uint32_t how) {
  facts(me_).gone.store(how);
  for (int r = 0; r < n_; ++r) {
    if (r != me_) wake(r);
  }
}

void ShmStreams::announce_sleep(bool asleep) {
  facts(me_).asleep.store(asleep ? 1 : 0, std::memory_order_seq_cst);
}

void ShmStreams::on_event() {
  char bytes[256];
  while (read(bell_.get(), bytes, sizeof bytes) == ssize_t(sizeof bytes)) {
  }
}

}  // namespace comm_core
