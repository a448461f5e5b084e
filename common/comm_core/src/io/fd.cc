#include "io/fd.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>

namespace comm_core {

namespace {

std::atomic<uint32_t> times_forked{0};

// All open descriptors of this process, which a forked child closes.
struct OpenOnes {
  OpenOnes() {
    pthread_atfork([] { instance().mutex.lock(); }, [] { instance().mutex.unlock(); },
                   [] { instance().forget(); });
  }

  // Never destroyed, because static objects may close their descriptors after it would be gone.
  static OpenOnes& instance() {
    static OpenOnes* ones = new OpenOnes;
    return *ones;
  }

  // Runs in the child. Its only thread locked the mutex before the fork.
  void forget() {
    for (int fd : fds) ::close(fd);
    fds.clear();
    ++times_forked;
    mutex.unlock();
  }

  std::mutex mutex;
  std::set<int> fds;
};

}  // namespace

uint32_t forks() { return times_forked.load(std::memory_order_relaxed); }

Fd::Fd(int fd) : fd_(fd), forks_(forks()) {
  if (fd < 0) return;
  OpenOnes& ones = OpenOnes::instance();
  std::lock_guard<std::mutex> lock(ones.mutex);
  ones.fds.insert(fd);
}

void Fd::reset() {
  if (fd_ >= 0 && forks_ == forks()) {
    OpenOnes& ones = OpenOnes::instance();
    std::lock_guard<std::mutex> lock(ones.mutex);
    ones.fds.erase(fd_);
    ::close(fd_);
  }
  fd_ = -1;
}

}  // namespace comm_core
