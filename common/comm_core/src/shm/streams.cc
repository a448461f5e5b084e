#include "shm/streams.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace comm_core {

namespace {

constexpr size_t kLine = 128;  // two cache lines: neighbours are fetched in pairs

// A round that stays in a core's own cache; and one for ranks that must take turns on the
// processors, where every hand-over may be a context switch.
constexpr size_t kSlot = 256 << 10, kSharedCoreSlot = 1 << 20;
// The larger rounds must leave room for the groups to come: at most this part of what is free.
constexpr size_t kModestPart = 16;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Names are only for the ranks to meet; they go in any case, also when a peer never comes.
struct Name {
  std::string path;
  ~Name() {
    if (!path.empty()) unlink(path.c_str());
  }
};

}  // namespace

struct ShmStreams::Facts {
  alignas(kLine) std::atomic<uint32_t> asleep;
  std::atomic<uint32_t> left;
};

ShmStreams::ShmStreams(Store& store, const std::vector<int>& ranks, int me, size_t slot_bytes)
    : n_(int(ranks.size())),
      me_(me),
      written_(size_t(2 * n_)),
      read_(size_t(2 * n_)),
      free_from_(size_t(2 * n_)) {
  const std::string leader = "shm" + std::to_string(ranks[0]);
  const auto key = [&](const char* what, int rank) { return what + std::to_string(rank); };
  std::string path;
  Name memory_name, bell_name;
  if (me_ == 0) {
    lay_out(slot_bytes > 0 ? slot_bytes : choose_slot());
    path = unique_path();
    mapping_ = Mapping::create(path, total_);  // a new file is all zeros
    memory_name.path = path;
    store.set(leader, std::to_string(slot_bytes_) + " " + path);
  } else {
    const std::string told = store.get(leader);
    char* rest = nullptr;
    lay_out(strtoull(told.c_str(), &rest, 10));
    path = rest + strspn(rest, " ");
    try {
      mapping_ = Mapping::open(path);
    } catch (const SystemError& error) {
      throw SystemError(std::string(error.what()) +
                        ": ranks with one host identity must share /dev/shm; give each its own " +
                        "with COMM_CORE_HOST_ID, or set COMM_CORE_TRANSPORT=tcp");
    }
    if (mapping_.bytes() != total_) throw MismatchError(path + " has another size than expected");
  }
  const std::string own_bell = path + "." + std::to_string(me_);
  if (mkfifo(own_bell.c_str(), 0600) != 0) throw_errno("cannot create " + own_bell);
  bell_name.path = own_bell;
  bell_ = Fd(open(own_bell.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
  if (!bell_) throw_errno("cannot open " + own_bell);
  store.set(key("bell", ranks[size_t(me_)]), "1");
  for (int r = 0; r < n_; ++r) {
    store.get(key("bell", ranks[size_t(r)]));
    const std::string bell = path + "." + std::to_string(r);
    bells_.emplace_back(open(bell.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
    if (!bells_.back()) throw_errno("cannot open " + bell);
  }
  store.set(key("open", ranks[size_t(me_)]), "1");
  for (int rank : ranks) store.get(key("open", rank));
}

ShmStreams::~ShmStreams() = default;

size_t ShmStreams::choose_slot() {
  if (n_ <= int(std::thread::hardware_concurrency())) return kSlot;
  lay_out(kSharedCoreSlot);
  struct statvfs room{};
  if (statvfs("/dev/shm", &room) != 0) return kSlot;
  return room.f_bavail * room.f_frsize / kModestPart >= total_ ? kSharedCoreSlot : kSlot;
}

void ShmStreams::lay_out(size_t slot_bytes) {
  const size_t n = size_t(n_);
  slot_bytes_ = round_up(slot_bytes, 4096);
  slot_stride_ = round_up(sizeof(SlotHeader) + 8 * n, 64) + slot_bytes_;
  counters_offset_ = n * sizeof(Facts);
  // published: a line each for 2n streams; released: a row of 2n counters for each reader.
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

bool ShmStreams::room(int stream) {
  const uint64_t round = written_[size_t(stream)];
  uint64_t& known = free_from_[size_t(stream)];  // rounds before this one have been read by all
  if (round < known + kSlots) return true;
  uint64_t least = UINT64_MAX;
  for (int r = 0; r < n_; ++r) {
    if (r != me_) {
      least = std::min(least, released(r, stream).load(std::memory_order_acquire));
    }
  }
  known = least;
  return round < known + kSlots;
}

void ShmStreams::publish(int stream) {
  published(stream).store(++written_[size_t(stream)], std::memory_order_seq_cst);
  for (int r = 0; r < n_; ++r) {
    if (r != me_) wake(r);
  }
}

bool ShmStreams::ready(int stream) const {
  return published(stream).load(std::memory_order_acquire) > read_[size_t(stream)];
}

void ShmStreams::release(int stream, uint64_t rounds) {
  read_[size_t(stream)] += rounds;
  released(me_, stream).store(read_[size_t(stream)], std::memory_order_seq_cst);
  wake(stream % n_);
}

void ShmStreams::wake(int r) {
  std::atomic<uint32_t>& asleep = facts(r).asleep;
  if (asleep.load(std::memory_order_seq_cst) != 0 && asleep.exchange(0) != 0) {
    // A full pipe is as good: its reader has been rung for already.
    (void)!write(bells_[size_t(r)].get(), "", 1);
  }
}

bool ShmStreams::left(int r) const { return facts(r).left.load(std::memory_order_acquire) != 0; }

void ShmStreams::leave() {
  facts(me_).left.store(1, std::memory_order_seq_cst);
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
