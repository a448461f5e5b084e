// One direction of bytes between two ranks, however they travel. Nothing blocks.
#pragma once

#include <sys/uio.h>

#include <string>

#include "base/poller.h"

namespace comm_core {

// In which set a lane's events are, and whom they are told, if anybody.
struct Watching {
  Poller& poller;
  Watch watch = Watch::when_active;
  Watcher* watcher = nullptr;
};

class Lane {
 public:
  explicit Lane(std::string peer) : peer_(std::move(peer)) {}
  virtual ~Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // The other rank, for messages: "rank 3 (host b, 10.0.0.2:4242)".
  const std::string& peer() const { return peer_; }

  // Whether bytes may pass: one that this rank has opened has to be let in first. Throws
  // PeerLostError, or MismatchError where the other side is not who it should be.
  virtual bool ready() = 0;
  // Bytes taken or given; 0 if there is no room or nothing there now. Throws PeerLostError.
  virtual size_t write(const iovec* parts, int num_parts) = 0;
  virtual size_t read(void* data, size_t bytes) = 0;

  // To be woken for fewer bytes than these is not worth it.
  virtual void wake_from(size_t bytes) = 0;
  // What is urgent waits for about so many bytes that were written before it and are not yet under
  // way, not for all that a buffer would hold.
  virtual void limit_unsent(size_t bytes) = 0;
  // Nobody is told of its events from now on.
  virtual void ignore() = 0;

  size_t write(const void* data, size_t bytes) {
    const iovec part{const_cast<void*>(data), bytes};
    return write(&part, 1);
  }
  // All of `bytes`, of which `done` have passed in earlier calls: true at the end, with `done` 0.
  bool flush(const void* data, size_t bytes, size_t& done) {
    while (done < bytes) {
      const size_t sent = write(static_cast<const char*>(data) + done, bytes - done);
      if (sent == 0) return false;
      done += sent;
    }
    done = 0;
    return true;
  }
  bool fill(void* data, size_t bytes, size_t& done) {
    while (done < bytes) {
      const size_t got = read(static_cast<char*>(data) + done, bytes - done);
      if (got == 0) return false;
      done += got;
    }
    done = 0;
    return true;
  }

 private:
  const std::string peer_;
};

}  // namespace comm_core
