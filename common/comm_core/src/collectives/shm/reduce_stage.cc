#include "collectives/shm/reduce_stage.h"

#include <algorithm>

#include "collectives/shm/copy_stage.h"
#include "reduce/kernels.h"

namespace comm_core {

ShmReduceStage::ShmReduceStage(ShmStreams& streams, ShmReducePlan plan,
                               std::vector<std::string> peers)
    : streams_(streams), plan_(std::move(plan)), peers_(std::move(peers)) {
  const int n = streams_.size(), me = streams_.me();
  // A slot is shared by the readers; an only one (the root of a reduce) has it for himself.
  const auto owners =
      std::count_if(plan_.bytes.begin(), plan_.bytes.end(), [](size_t bytes) { return bytes > 0; });
  portion_ = owners <= 1 ? streams_.slot_bytes()
                         : std::max<size_t>(64, streams_.slot_bytes() / size_t(n - 1) / 64 * 64);
  my_rounds_ = rounds_of(me);
  rounds_in_ = ShmCopyStage::rounds_for(plan_.bytes[size_t(me)], portion_);
}

int64_t ShmReduceStage::rounds_of(int writer) const {
  size_t most = 0;
  for (int r = 0; r < streams_.size(); ++r) {
    if (r != writer) most = std::max(most, plan_.bytes[size_t(r)]);
  }
  return ShmCopyStage::rounds_for(most, portion_);
}

Progress ShmReduceStage::step() {
  bool moved = consume();
  moved = produce() || moved;
  if (consumed_ == rounds_in_ && produced_ == my_rounds_) return Progress::done;
  return moved ? Progress::moved : Progress::blocked;
}

bool ShmReduceStage::produce() {
  const int me = streams_.me();
  const int stream = streams_.inputs(me);
  if (produced_ == my_rounds_ || !streams_.room(stream)) return false;
  SlotHeader& header = streams_.header(stream);
  header.frame = plan_.frame;
  uint64_t* lengths = streams_.lengths(stream);
  const size_t begin = size_t(produced_) * portion_;
  for (int r = 0; r < streams_.size(); ++r) {
    if (r == me) continue;
    const ConstSpan& block = plan_.inputs[size_t(r)];
    lengths[r] = block.bytes;
    if (begin < block.bytes) {
      copy(streams_.data(stream) + place(r, me), block.data + begin,
           std::min(portion_, block.bytes - begin));
    }
  }
  header.last = ++produced_ == my_rounds_;
  streams_.publish(stream);
  return true;
}

bool ShmReduceStage::consume() {
  if (consumed_ == rounds_in_) return false;
  const int n = streams_.size(), me = streams_.me();
  for (int w = 0; w < n; ++w) {
    if (w == me || streams_.ready(streams_.inputs(w))) continue;
    if (streams_.left(w) && !streams_.ready(streams_.inputs(w))) {
      throw PeerLostError("lost " + peers_[size_t(w)] + ": it left the group");
    }
    return false;
  }
  const size_t begin = size_t(consumed_) * portion_;
  const size_t bytes = plan_.bytes[size_t(me)];
  const size_t now = begin < bytes ? std::min(portion_, bytes - begin) : 0;
  std::vector<const void*> sources(size_t(n), nullptr);
  for (int w = 0; w < n; ++w) {
    if (w == me) {
      sources[size_t(w)] = plan_.inputs[size_t(me)].data + begin;
      continue;
    }
    const int stream = streams_.inputs(w);
    if (consumed_ == 0) {
      FrameHeader theirs = streams_.front(stream).frame;
      theirs.payload_bytes = streams_.front_lengths(stream)[me];
      FrameHeader mine = plan_.frame;
      mine.payload_bytes = bytes;
      check_header(mine, theirs, peers_[size_t(w)]);
    }
    sources[size_t(w)] = streams_.front_data(stream) + place(me, w);
  }
  if (now > 0) {
    const size_t count = now / size_of(plan_.dtype);
    char* out = plan_.output.data + begin;
    reduce(plan_.dtype, plan_.op, out, sources.data(), n, count, plan_.streaming);
    if (plan_.divisor > 0) divide(plan_.dtype, out, count, plan_.divisor);
  }
  ++consumed_;
  for (int w = 0; w < n; ++w) {
    if (w == me) continue;
    // Rounds with larger blocks of others than mine do not concern me, but they count.
    const bool last = consumed_ == rounds_in_;
    streams_.release(streams_.inputs(w), last ? uint64_t(1 + rounds_of(w) - rounds_in_) : 1);
  }
  return true;
}

std::string ShmReduceStage::status() const {
  return "waiting for the ranks of this host (" +
         std::to_string(
             std::min(size_t(consumed_) * portion_, plan_.bytes[size_t(streams_.me())])) +
         " of " + std::to_string(plan_.bytes[size_t(streams_.me())]) + " bytes reduced)";
}

}  // namespace comm_core
