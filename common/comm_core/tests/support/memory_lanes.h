// Lanes in the memory of one thread, for tests without sockets.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>

#include "base/errors.h"
#include "transport/device.h"

namespace comm_core::testing {

// Bytes on their way from one rank to another.
struct Wire {
  std::deque<char> bytes;
  size_t room = 0;  // bytes that it holds at most
  uint64_t written = 0, read = 0;
  bool lost = false;  // the other rank has ended
};

// One end of a wire, used for writing or for reading.
class MemoryLane : public Lane {
 public:
  MemoryLane(std::shared_ptr<Wire> wire, std::string peer)
      : Lane(std::move(peer)), wire_(std::move(wire)) {}
  using Lane::write;
  bool ready() override { return true; }
  size_t write(const iovec* parts, int num_parts) override {
    if (wire_->lost) throw PeerLostError("lost " + peer());
    size_t written = 0;
    for (int i = 0; i < num_parts; ++i) {
      const char* data = static_cast<const char*>(parts[i].iov_base);
      const size_t n = std::min(parts[i].iov_len, wire_->room - wire_->bytes.size());
      wire_->bytes.insert(wire_->bytes.end(), data, data + n);
      written += n;
    }
    wire_->written += written;
    return written;
  }
  size_t read(void* data, size_t bytes) override {
    const size_t n = std::min(bytes, wire_->bytes.size());
    if (n == 0 && wire_->lost) throw PeerLostError("lost " + peer());
    std::copy_n(wire_->bytes.begin(), n, static_cast<char*>(data));
    wire_->bytes.erase(wire_->bytes.begin(), wire_->bytes.begin() + long(n));
    wire_->read += n;
    return n;
  }
  void wake_from(size_t) override {}
  void limit_unsent(size_t) override {}
  void ignore() override {}

 private:
  const std::shared_ptr<Wire> wire_;
};

// The wires between the ranks of a group.
class Wires {
 public:
  explicit Wires(size_t room) : room_(room) {}
  Wire& at(int from, int to) { return *wire(from, to); }
  std::unique_ptr<Lane> lane(int from, int to, const std::string& peer) {
    return std::make_unique<MemoryLane>(wire(from, to), peer);
  }

 private:
  std::shared_ptr<Wire> wire(int from, int to) {
    std::shared_ptr<Wire>& wire = wires_[{from, to}];
    if (wire == nullptr) wire = std::make_shared<Wire>(Wire{.bytes = {}, .room = room_});
    return wire;
  }
  const size_t room_;
  std::map<std::pair<int, int>, std::shared_ptr<Wire>> wires_;
};

}  // namespace comm_core::testing
