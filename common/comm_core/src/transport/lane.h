// Byte stream between two ranks, over any transport. Payload goes in one direction only, from the
// rank that connects. Control messages go both ways. No call blocks.
#pragma once

#include <sys/uio.h>

#include <string>

#include "io/poller.h"

namespace comm_core {

// Registration of a lane's events: the poller and its set, and the watcher to call (null: none).
struct Watching {
  Poller& poller;
  Watch watch = Watch::when_active;
  Watcher* watcher = nullptr;
};

// Belongs to the thread that drives the engine.
class Lane {
 public:
  explicit Lane(std::string peer) : peer_(std::move(peer)) {}
  virtual ~Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Returns the label of the other rank for messages: "rank 3 (host b, 10.0.0.2:4242)".
  const std::string& peer() const { return peer_; }

  // Continues the handshake of a lane that this rank has opened. Returns true once data can be
  // sent. Throws PeerLostError, or MismatchError if the peer does not know the secret.
  virtual bool ready() = 0;
  // Return the bytes written or read: 0 if the buffers are full or empty now. Throw PeerLostError.
  virtual size_t write(const iovec* parts, int num_parts) = 0;
  virtual size_t read(void* data, size_t bytes) = 0;

  // Wakes a waiting engine only when at least `bytes` bytes can be read.
  virtual void wake_from(size_t bytes) = 0;
  // Limits the written but unsent bytes in the kernel to about `bytes`, so that urgent data waits
  // for these only and not for a full send buffer.
  virtual void limit_unsent(size_t bytes) = 0;
  // Stops the delivery of events to the watcher.
  virtual void ignore() = 0;

  size_t write(const void* data, size_t bytes) {
    const iovec part{const_cast<void*>(data), bytes};
    return write(&part, 1);
  }
  // Write or read exactly `bytes` bytes over several calls. `done` counts the bytes so far. Return
  // true at the end and reset `done` to 0.
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
