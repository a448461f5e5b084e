#include "collectives/shm/copy_stage.h"

#include <algorithm>

#include "reduce/kernels.h"

namespace comm_core {

int64_t ShmCopyStage::rounds_for(size_t bytes, size_t portion) {
  return std::max<int64_t>(1, int64_t((bytes + portion - 1) / portion));
}

ShmCopyStage::ShmCopyStage(ShmStreams& streams, ShmCopyPlan plan, std::vector<std::string> peers)
    : streams_(streams),
      plan_(std::move(plan)),
      peers_(std::move(peers)),
      consumed_(size_t(streams.size())),
      finished_(size_t(streams.size())) {
  const int me = streams_.me();
  for (int r = 0; r < streams_.size(); ++r) {
    const size_t i = size_t(r);
    if (r == me) {
      finished_[i] = true;
    } else if (!plan_.listens[i]) {
      if (plan_.rounds[i] > 0) streams_.release(streams_.inputs(r), uint64_t(plan_.rounds[i]));
      finished_[i] = true;
    }
  }
}

size_t ShmCopyStage::place(int r, int w) const {
  // Slots of one receiver hold his block alone.
  if (plan_.multicast || plan_.portion == streams_.slot_bytes()) return 0;
  return size_t(r < w ? r : r - 1) * plan_.portion;
}

Progress ShmCopyStage::step() {
  bool moved = false;
  bool all = true;
  const int n = streams_.size();
  // Neighbours first: not everybody reads the same rank's memory at once.
  for (int k = 1; k < n; ++k) {
    const int r = (streams_.me() + k) % n;
    if (finished_[size_t(r)]) continue;
    moved = consume(r) || moved;
    all = all && finished_[size_t(r)];
  }
  moved = produce() || moved;
  all = all && produced_ == plan_.rounds[size_t(streams_.me())];
  if (all) return Progress::done;
  return moved ? Progress::moved : Progress::blocked;
}

bool ShmCopyStage::produce() {
  const int me = streams_.me();
  const int stream = streams_.inputs(me);
  if (produced_ == plan_.rounds[size_t(me)] || !streams_.room(stream)) return false;
  SlotHeader& header = streams_.header(stream);
  header.frame = plan_.frame;
  uint64_t* lengths = streams_.lengths(stream);
  const size_t begin = size_t(produced_) * plan_.portion;
  int64_t needed = 1;
  for (int r = 0; r < streams_.size(); ++r) {
    if (r == me) continue;
    const ConstSpan& block = plan_.outgoing[plan_.multicast ? 0 : size_t(r)];
    lengths[r] = block.bytes;
    needed = std::max(needed, rounds_for(block.bytes, plan_.portion));
    if (begin < block.bytes && (!plan_.multicast || r == (me == 0 ? 1 : 0))) {
      copy(streams_.data(stream) + place(r, me), block.data + begin,
           std::min(plan_.portion, block.bytes - begin));
    }
  }
  ++produced_;
  int64_t& total = plan_.rounds[size_t(me)];
  if (total == ShmCopyPlan::kUntilLast && produced_ == needed) total = needed;
  header.last = produced_ == total;
  streams_.publish(stream);
  return true;
}

bool ShmCopyStage::consume(int r) {
  const size_t i = size_t(r);
  const int stream = streams_.inputs(r);
  if (!streams_.ready(stream)) {
    // What it published before it left is there to be read; look again after seeing the flag.
    if (streams_.left(r) && !streams_.ready(stream)) {
      throw PeerLostError("lost " + peers_[i] + ": it left the group");
    }
    return false;
  }
  const SlotHeader& header = streams_.front(stream);
  const Span& block = plan_.incoming[i];
  if (consumed_[i] == 0) {
    FrameHeader theirs = header.frame;
    theirs.payload_bytes = streams_.front_lengths(stream)[streams_.me()];
    FrameHeader mine = plan_.frame;
    mine.payload_bytes = block.bytes;
    check_header(mine, theirs, peers_[i]);
  }
  const size_t begin = size_t(consumed_[i]) * plan_.portion;
  if (begin < block.bytes) {
    copy(block.data + begin, streams_.front_data(stream) + place(streams_.me(), r),
         std::min(plan_.portion, block.bytes - begin), plan_.streaming);
  }
  ++consumed_[i];
  const int64_t total = plan_.rounds[i];
  finished_[i] = total == ShmCopyPlan::kUntilLast ? header.last != 0 : consumed_[i] == total;
  streams_.release(stream);
  return true;
}

std::string ShmCopyStage::status() const {
  std::string text;
  for (int r = 0; r < streams_.size(); ++r) {
    const size_t i = size_t(r);
    if (finished_[i]) continue;
    const size_t got = std::min(size_t(consumed_[i]) * plan_.portion, plan_.incoming[i].bytes);
    text += (text.empty() ? "waiting for " : ", ") + peers_[i] + " (" + std::to_string(got) +
            " of " + std::to_string(plan_.incoming[i].bytes) + " bytes received)";
  }
  if (!text.empty()) return text;
  return "waiting for the ranks of this host to read (" + std::to_string(produced_) + " of " +
         std::to_string(plan_.rounds[size_t(streams_.me())]) + " rounds written)";
}

}  // namespace comm_core
