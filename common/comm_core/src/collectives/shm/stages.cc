#include "collectives/shm/stages.h"

#include <algorithm>
#include <cstring>

namespace comm_core {

int64_t rounds_for(size_t bytes, size_t portion) {
  return std::max<int64_t>(1, int64_t((bytes + portion - 1) / portion));
}

size_t shared_portion(const ShmStreams& streams) {
  const size_t others = size_t(std::max(1, streams.size() - 1));
  return std::max<size_t>(64, streams.slot_bytes() / others / 64 * 64);
}

std::string ShmStage::late(const std::function<bool(int r)>& come) const {
  std::string names;
  for (int r = 0; r < n_; ++r) {
    if (r != me_ && !come(r)) names += (names.empty() ? "" : ", ") + label(r);
  }
  return names;
}

std::string ShmStage::unread() const {
  return late([this](int r) { return streams_.room_of(r, streams_.inputs(me_)); });
}

bool ShmStage::arrived(int r, int stream) const {
  if (streams_.ready(stream)) return true;
  // Rounds that r published before it left can be read, so check again after reading the flag.
  if (streams_.left(r) && !streams_.ready(stream)) {
    throw PeerLostError("lost " + label(r) + ": it left the group");
  }
  return false;
}

void ShmStage::put_frame(SlotHeader& header) const {
  static_assert(sizeof frame_ == SlotHeader::kFrameBytes);
  memcpy(header.frame, &frame_, sizeof frame_);
}

FrameHeader ShmStage::frame_of(const SlotHeader& header) {
  FrameHeader frame;
  memcpy(&frame, header.frame, sizeof frame);
  return frame;
}

void ShmStage::check(int r, size_t bytes) const {
  const int stream = streams_.inputs(r);
  FrameHeader theirs = frame_of(streams_.front(stream)), mine = frame_;
  theirs.payload_bytes = streams_.front_lengths(stream)[me_];
  mine.payload_bytes = bytes;
  check_header(mine, theirs, label(r));
}

}  // namespace comm_core
