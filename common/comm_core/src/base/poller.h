// Two epoll sets: what must be answered even when this rank has nothing to do, and everything.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>

#include "base/fd.h"

namespace comm_core {

class Watcher {
 public:
  virtual ~Watcher() = default;
  virtual void on_event() = 0;
};

// Which set a descriptor belongs to. `always`: new connections, control and messages, which the
// engine's own thread answers. `when_active`: data of collectives, looked at only while one runs.
enum class Watch { always, when_active };

class Poller {
 public:
  Poller();

  // Edge-triggered: the owner reads or writes until the kernel says EAGAIN. `watcher` may be null
  // if it is enough that a wait ends. Returns a number for `remove`.
  uint64_t add(int fd, Watch watch, Watcher* watcher);
  void remove(uint64_t id, int fd, Watch watch);

  // Waits for events of the set at most `timeout_s` (kNever: for ever) and calls their watchers.
  // Returns the number of events.
  int wait(Watch watch, double timeout_s);
  // Only waits: nothing is called and no event is lost.
  void wait_only(Watch watch, double timeout_s);

  // Ends a wait from any thread.
  void wake();

 private:
  int fd_of(Watch watch) const { return watch == Watch::always ? always_.get() : all_.get(); }
  int dispatch(int epoll_fd, int timeout_ms);

  Fd always_, all_, wake_;
  uint64_t next_id_ = 2;
  std::unordered_map<uint64_t, Watcher*> watchers_;
};

// A descriptor is watched as long as this lives, which must end before it is closed.
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
