// The lanes of one rank that carry collectives, to and from the other ranks of its group.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/lane.h"
#include "transport/topology.h"

namespace comm_core {

// Belongs to the thread that drives the engine.
class Lanes {
 public:
  using Connect = std::function<std::unique_ptr<Lane>(int peer)>;

  // `peers`: of a group of `size` ranks. The caller owns it and fills it in before the first
  // collective. `chunk`: bytes moved at a time.
  Lanes(const std::vector<PeerInfo>& peers, int size, size_t chunk, Connect connect);

  int size() const { return int(in_.size()); }
  size_t chunk() const { return chunk_; }
  const std::string& label(int peer) const { return peers_[size_t(peer)].label; }

  // Returns the lane to `peer`, opened on first use. It may not be ready yet.
  Lane& out(int peer);
  // Returns the lane from `peer`, or null until it has connected.
  Lane* in(int peer) { return in_[size_t(peer)].get(); }
  // Writes to `lane` and returns the bytes written: 0 while the operation must not send.
  size_t write(Lane& lane, const iovec* parts, int num_parts);
  // Called when the first bytes of this operation arrive from a peer.
  void meet_peer() { met_ = true; }

  // For the group: takes over the lane from `peer`.
  void enter(int peer, std::unique_ptr<Lane> lane) { in_[size_t(peer)] = std::move(lane); }
  // Begins an operation, which no peer is known to have started.
  void begin() { met_ = false; }
  bool met() const { return met_; }
  // Forbids the operation to send, or allows it.
  void hold(bool held) { held_ = held; }
  // Limits the unsent bytes in the sockets to about a chunk.
  void limit_unsent();
  void close();

 private:
  const std::vector<PeerInfo>& peers_;
  const size_t chunk_;
  const Connect connect_;
  std::vector<std::unique_ptr<Lane>> in_, out_;
  bool held_ = false, met_ = false, limits_unsent_ = false;
};

}  // namespace comm_core
