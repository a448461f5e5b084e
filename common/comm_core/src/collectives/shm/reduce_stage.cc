#include <algorithm>

#include "collectives/collectives.h"
#include "collectives/shm/stages.h"
#include "reduce/kernels.h"

namespace comm_core {
namespace {

class ShmReduceStage : public ShmStage {
 public:
  ShmReduceStage(const LocalRanks& local, const FrameHeader& frame, ShmReducePlan plan)
      : ShmStage(local, frame), plan_(std::move(plan)), bytes_(plan_.inputs[size_t(me_)].bytes) {
    // The readers share a slot. A single reader (the root of a reduce) gets all of it.
    const auto owners = std::count_if(plan_.inputs.begin(), plan_.inputs.end(),
                                      [](const ConstSpan& block) { return block.bytes > 0; });
    portion_ = owners <= 1 ? streams_.slot_bytes() : shared_portion(streams_);
    my_rounds_ = rounds_of(me_);
    rounds_in_ = rounds_for(bytes_, portion_);
  }

  Progress step() override {
    bool moved = consume();
    moved = produce() || moved;
    return progress(consumed_ == rounds_in_ && produced_ == my_rounds_, moved);
  }

  std::string status() const override {
    std::string missing;
    if (consumed_ < rounds_in_) {
      missing = late([&](int r) { return streams_.ready(streams_.inputs(r)); });
    }
    if (missing.empty()) missing = unread();
    return "waiting for " + (missing.empty() ? "the ranks of this host" : missing) + " (" +
           std::to_string(std::min(size_t(consumed_) * portion_, bytes_)) + " of " +
           std::to_string(bytes_) + " bytes reduced)";
  }

 private:
  int64_t rounds_of(int writer) const {
    size_t most = 0;
    for (int r = 0; r < n_; ++r) {
      if (r != writer) most = std::max(most, plan_.inputs[size_t(r)].bytes);
    }
    return rounds_for(most, portion_);
  }

  bool produce() {
    const int stream = streams_.inputs(me_);
    if (produced_ == my_rounds_ || !streams_.room(stream)) return false;
    SlotHeader& header = streams_.header(stream);
    put_frame(header);
    uint64_t* lengths = streams_.lengths(stream);
    const size_t begin = size_t(produced_) * portion_;
    for (int r = 0; r < n_; ++r) {
      if (r == me_) continue;
      const ConstSpan& block = plan_.inputs[size_t(r)];
      lengths[r] = block.bytes;
      if (begin < block.bytes) {
        copy(streams_.data(stream) + place(r, me_, portion_), block.data + begin,
             std::min(portion_, block.bytes - begin));
      }
    }
    header.last = ++produced_ == my_rounds_;
    streams_.publish(stream);
    return true;
  }

  bool consume() {
    if (consumed_ == rounds_in_) return false;
    for (int w = 0; w < n_; ++w) {
      if (w != me_ && !arrived(w, streams_.inputs(w))) return false;
    }
    const size_t begin = size_t(consumed_) * portion_;
    std::vector<const void*> sources(size_t(n_), plan_.inputs[size_t(me_)].data + begin);
    for (int w = 0; w < n_; ++w) {
      if (w == me_) continue;
      if (consumed_ == 0) check(w, bytes_);
      sources[size_t(w)] = streams_.front_data(streams_.inputs(w)) + place(me_, w, portion_);
    }
    if (begin < bytes_) {
      fold(frame_, plan_.divisor, plan_.output.data + begin, sources.data(), n_,
           std::min(portion_, bytes_ - begin), plan_.streaming);
    }
    ++consumed_;
    for (int w = 0; w < n_; ++w) {
      if (w == me_) continue;
      // Further rounds, of larger blocks of other readers, are released unread.
      const bool last = consumed_ == rounds_in_;
      streams_.release(streams_.inputs(w), last ? uint64_t(1 + rounds_of(w) - rounds_in_) : 1);
    }
    return true;
  }

  const ShmReducePlan plan_;
  const size_t bytes_;  // of this rank's block
  size_t portion_;
  int64_t my_rounds_, produced_ = 0;
  int64_t rounds_in_, consumed_ = 0;
};

}  // namespace

std::unique_ptr<Stage> shm_reduce(const LocalRanks& local, const FrameHeader& frame,
                                  ShmReducePlan plan) {
  return std::make_unique<ShmReduceStage>(local, frame, std::move(plan));
}

}  // namespace comm_core
