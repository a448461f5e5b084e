// For ThreadSanitizer only: maps a file at most once per process, so the ranks share its addresses.
// The sanitizer identifies memory by its address. With one mapping per rank it would not see that
// two ranks access the same slot, nor the counters that order them, and so find no race in shared
// memory. The linker replaces the calls in src by these functions (-Wl,--wrap).
#include <sys/mman.h>
#include <sys/stat.h>

#include <map>
#include <mutex>
#include <utility>

extern "C" {
void* __real_mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void* at, size_t bytes);
void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void* at, size_t bytes);
}

namespace {

struct Shared {
  void* data = nullptr;
  int users = 0;
};

std::mutex mutex;
std::map<std::pair<dev_t, ino_t>, Shared> mappings;

}  // namespace

void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  struct stat facts{};
  if (fd < 0 || fstat(fd, &facts) != 0) {
    return __real_mmap(at, bytes, protection, flags, fd, offset);
  }
  std::lock_guard<std::mutex> lock(mutex);
  Shared& shared = mappings[{facts.st_dev, facts.st_ino}];
  if (shared.users++ == 0) shared.data = __real_mmap(at, bytes, protection, flags, fd, offset);
  return shared.data;
}

int __wrap_munmap(void* at, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto i = mappings.begin(); i != mappings.end(); ++i) {
    if (i->second.data != at) continue;
    if (--i->second.users > 0) return 0;
    mappings.erase(i);
    break;
  }
  return __real_munmap(at, bytes);
}
