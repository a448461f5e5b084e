#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/errors.h"
#include "secret/random.h"

namespace comm_core {

namespace {

constexpr size_t kPage = 4096;

size_t mapped_bytes(size_t bytes) { return (bytes + sizeof(uint64_t) + kPage - 1) / kPage * kPage; }

char* identity(const Mapping& mapping) {
  return mapping.data() + mapping.bytes() - sizeof(uint64_t);
}

}  // namespace

RemoteFd RemoteFd::of(const Fd& fd) { return {int(getpid()), fd.get()}; }

Fd RemoteFd::open(int flags) const {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  Fd opened(::open(path.c_str(), flags | O_CLOEXEC));
  if (!opened) throw_errno("cannot open " + path);
  return opened;
}

Mapping::Mapping(const Fd& fd, size_t bytes, const std::string& what) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd.get(), 0);
  if (data == MAP_FAILED) throw_errno("cannot map " + what);
  data_ = static_cast<char*>(data);
  bytes_ = bytes;
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Mapping make_segment(size_t bytes, bool now, Fd& fd, Segment& made) {
  const std::string what = std::to_string(bytes) + " bytes of shared memory";
  fd = Fd(memfd_create("comm_core", MFD_CLOEXEC));
  if (!fd) throw_errno("no descriptor for " + what);
  const size_t mapped = mapped_bytes(bytes);
  // Without this allocation, a machine out of memory would kill the process on first use of a page.
  if (now) {
    errno = posix_fallocate(fd.get(), 0, off_t(mapped));
    if (errno != 0) throw_errno("no room for " + what);
  } else if (ftruncate(fd.get(), off_t(mapped)) != 0) {
    throw_errno("no room for " + what);
  }
  Mapping mapping(fd, mapped, what);
  made.place = RemoteFd::of(fd);
  made.bytes = mapped;
  random_bytes(&made.id, sizeof made.id);
  memcpy(identity(mapping), &made.id, sizeof made.id);
  return mapping;
}

Mapping open_segment(const Segment& segment) {
  const Fd fd = segment.place.open(O_RDWR);
  const std::string whose = "shared memory of process " + std::to_string(segment.place.pid);
  if (lseek(fd.get(), 0, SEEK_END) != off_t(segment.bytes) || segment.bytes < sizeof segment.id) {
    throw SystemError(whose + " does not have the expected size");
  }
  Mapping mapping(fd, segment.bytes, whose);
  if (!is(mapping, segment.id)) throw SystemError(whose + " is not the expected memory");
  return mapping;
}

bool is(const Mapping& mapping, uint64_t id) {
  uint64_t found = 0;
  memcpy(&found, identity(mapping), sizeof found);
  return found == id;
}

void disown(const Mapping& mapping, const Fd& fd) {
  memset(identity(mapping), 0, sizeof(uint64_t));
  // If the kernel cannot do this, the memory is freed with the last mapping.
  (void)fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, off_t(mapping.bytes()));
}

}  // namespace comm_core
