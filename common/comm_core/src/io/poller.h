// Two epoll sets: one with the descriptors that an idle rank must serve too, one with all of them.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>

#include "io/fd.h"

namespace comm_core {

// Receiver of a descriptor's events.
class Watcher {
 public:
  virtual ~Watcher() = default;
  virtual void on_event() = 0;
};

// The set that a descriptor belongs to. `always`: new connections, control connections and
// messages, which the engine thread serves at any time. `when_active`: data of collectives, which
// is polled only while a collective runs.
enum class Watch { always, when_active };

// Waits on both sets. `wake` and `wait_only` are thread-safe, all else belongs to the thread that
// drives the engine. Throws SystemError.
class Poller {
 public:
  Poller();

  // Adds `fd`, which is edge-triggered: the owner must read or write until the kernel returns
  // EAGAIN. The poller owns neither `fd` nor `watcher`. With a null `watcher` an event only ends
  // the wait. Returns an id for `remove`.
  uint64_t add(int fd, Watch watch, Watcher* watcher);
  void remove(uint64_t id, int fd, Watch watch);

  // Waits for events of the set for at most `timeout_s` seconds (kNever: no limit) and calls their
  // watchers. Returns the number of events.
  int wait(Watch watch, double timeout_s);
  // Only waits: no watcher is called, and the events remain for the next `wait`.
  void wait_only(Watch watch, double timeout_s);

  // Ends a wait. Thread-safe.
  void wake();

 private:
  int fd_of(Watch watch) const { return watch == Watch::always ? always_.get() : all_.get(); }
  int dispatch(int epoll_fd, int timeout_ms);

  Fd always_, all_, wake_;
  uint64_t next_id_ = 2;
  std::unordered_map<uint64_t, Watcher*> watchers_;
};

// Registration of a descriptor in a poller, removed on destruction. It must be destroyed before the
// descriptor is closed and before the poller.
class Watched {
 public:
  Watched() = default;
  Watched(Poller& poller, int fd, Watch watch, Watcher* watcher)
      : poller_(&poller), fd_(fd), watch_(watch), id_(poller.add(fd, watch, watcher)) {}
  Watched(Watched&& other) noexcept { *this = std::move(other); }
  Watched& operator=(Watched&& other) noexcept {
    std::swap(poller_, other.poller_);
    std::swap(fd_, other.fd_);
    std::swap(watch_, other.watch_);
    std::swap(id_, other.id_);
    return *this;
  }
  ~Watched() {
    if (poller_ != nullptr) poller_->remove(id_, fd_, watch_);
  }

 private:
  Poller* poller_ = nullptr;
  int fd_ = -1;
  Watch watch_ = Watch::always;
  uint64_t id_ = 0;
};

}  // namespace comm_core
