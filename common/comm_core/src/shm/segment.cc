#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/errors.h"
#include "tcp/socket.h"
#include "tcp/wire.h"

namespace comm_core {

Mapping::Mapping(const Fd& fd, size_t bytes, const std::string& what) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd.get(), 0);
  if (data == MAP_FAILED) throw_errno("cannot map " + what);
  data_ = static_cast<char*>(data);
  bytes_ = bytes;
}

Mapping Mapping::create(const std::string& path, size_t bytes) {
  Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd) throw_errno("cannot create " + path);
  // Without this, a full /dev/shm would kill the process at its first write.
  const int error = posix_fallocate(fd.get(), 0, off_t(bytes));
  if (error != 0) {
    unlink(path.c_str());
    throw SystemError("no room for " + std::to_string(bytes) + " bytes in /dev/shm (" +
                      strerror(error) + "): enlarge it (docker: --shm-size) or set " +
                      "COMM_CORE_TRANSPORT=tcp");
  }
  return open(path);
}

Mapping Mapping::open(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) throw_errno("cannot open " + path);
  struct stat facts{};
  if (fstat(fd.get(), &facts) != 0) throw_errno("cannot stat " + path);
  return Mapping(fd, size_t(facts.st_size), path);
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

std::string unique_path() {
  uint8_t random[8];
  random_bytes(random, sizeof random);
  std::string path = "/dev/shm/comm_core-" + std::to_string(getuid()) + "-";
  constexpr char kDigits[] = "0123456789abcdef";
  for (uint8_t byte : random) {
    path += kDigits[byte >> 4];
    path += kDigits[byte & 15];
  }
  return path;
}

}  // namespace comm_core
