#include "io/poller.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>

#include "base/clock.h"
#include "base/errors.h"

namespace comm_core {

namespace {

constexpr uint64_t kWakeId = 0;
constexpr uint64_t kNestedId = 1;

void control(int epoll_fd, int operation, int fd, uint32_t events, uint64_t id) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (epoll_ctl(epoll_fd, operation, fd, &event) != 0) throw_errno("epoll_ctl");
}

int milliseconds(double timeout_s) {
  if (timeout_s == kNever) return -1;
  return int(std::fmin(std::ceil(std::fmax(timeout_s, 0) * 1e3), 1e9));
}

}  // namespace

Poller::Poller()
    : always_(epoll_create1(EPOLL_CLOEXEC)),
      all_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!always_ || !all_ || !wake_) throw_errno("epoll_create1, eventfd");
  control(always_.get(), EPOLL_CTL_ADD, wake_.get(), EPOLLIN, kWakeId);
  control(all_.get(), EPOLL_CTL_ADD, always_.get(), EPOLLIN, kNestedId);
}

uint64_t Poller::add(int fd, Watch watch, Watcher* watcher) {
  const uint64_t id = next_id_++;
  control(fd_of(watch), EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, id);
  watchers_[id] = watcher;
  return id;
}

void Poller::remove(uint64_t id, int fd, Watch watch) {
  watchers_.erase(id);
  // Errors are ignored: destructors call this, and in a forked child both descriptors are closed.
  epoll_ctl(fd_of(watch), EPOLL_CTL_DEL, fd, nullptr);
}

int Poller::dispatch(int epoll_fd, int timeout_ms) {
  epoll_event events[64];
  const int found = epoll_wait(epoll_fd, events, 64, timeout_ms);
  if (found < 0) {
    if (errno == EINTR) return 0;
    throw_errno("epoll_wait");
  }
  for (int i = 0; i < found; ++i) {
    const uint64_t id = events[i].data.u64;
    if (id == kWakeId) {
      uint64_t count;
      (void)!::read(wake_.get(), &count, sizeof count);
    } else if (id == kNestedId) {
      dispatch(always_.get(), 0);
    } else {
      // The watcher of an earlier event of this batch may have removed this one.
      const auto watcher = watchers_.find(id);
      if (watcher != watchers_.end() && watcher->second != nullptr) watcher->second->on_event();
    }
  }
  return found;
}

int Poller::wait(Watch watch, double timeout_s) {
  return dispatch(fd_of(watch), milliseconds(timeout_s));
}

void Poller::wait_only(Watch watch, double timeout_s) {
  pollfd ready{fd_of(watch), POLLIN, 0};
  if (poll(&ready, 1, milliseconds(timeout_s)) < 0 && errno != EINTR) throw_errno("poll");
}

void Poller::wake() {
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

}  // namespace comm_core
