#include "collectives/lanes/lanes.h"

namespace comm_core {

Lanes::Lanes(const std::vector<PeerInfo>& peers, int size, size_t chunk, Connect connect)
    : peers_(peers),
      chunk_(chunk),
      connect_(std::move(connect)),
      in_(size_t(size)),
      out_(size_t(size)) {}

Lane& Lanes::out(int peer) {
  std::unique_ptr<Lane>& out = out_[size_t(peer)];
  if (out == nullptr) {
    out = connect_(peer);
    if (limits_unsent_) out->limit_unsent(chunk_);
  }
  return *out;
}

size_t Lanes::write(Lane& lane, const iovec* parts, int num_parts) {
  return held_ ? 0 : lane.write(parts, num_parts);
}

void Lanes::limit_unsent() {
  if (limits_unsent_) return;
  limits_unsent_ = true;
  for (const std::unique_ptr<Lane>& lane : out_) {
    if (lane != nullptr) lane->limit_unsent(chunk_);
  }
}

void Lanes::close() {
  for (std::unique_ptr<Lane>& lane : in_) lane.reset();
  for (std::unique_ptr<Lane>& lane : out_) lane.reset();
}

}  // namespace comm_core
