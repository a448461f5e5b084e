#include <algorithm>

#include "collectives/shm/stages.h"
#include "reduce/kernels.h"

namespace comm_core {
namespace {

class ShmCopyStage : public ShmStage {
 public:
  ShmCopyStage(const LocalRanks& local, const FrameHeader& frame, ShmCopyPlan plan)
      : ShmStage(local, frame),
        plan_(std::move(plan)),
        consumed_(size_t(n_)),
        finished_(size_t(n_)) {
    for (int r = 0; r < n_; ++r) {
      const size_t i = size_t(r);
      finished_[i] = r == me_ || !plan_.listens[i];
      if (r != me_ && finished_[i] && plan_.rounds[i] > 0) {
        streams_.release(streams_.inputs(r), uint64_t(plan_.rounds[i]));
      }
    }
  }

  Progress step() override {
    bool moved = false, all = true;
    // Begins with the next rank, so that not all ranks read the same memory at the same time.
    for (int k = 1; k < n_; ++k) {
      const int r = (me_ + k) % n_;
      if (finished_[size_t(r)]) continue;
      moved = consume(r) || moved;
      all = all && finished_[size_t(r)];
    }
    moved = produce() || moved;
    return progress(all && produced_ == plan_.rounds[size_t(me_)], moved);
  }

  std::string status() const override {
    std::string text;
    for (int r = 0; r < n_; ++r) {
      const size_t i = size_t(r);
      if (finished_[i]) continue;
      const size_t got = std::min(size_t(consumed_[i]) * plan_.portion, plan_.incoming[i].bytes);
      text += (text.empty() ? "waiting for " : ", ") + label(r) + " (" + std::to_string(got) +
              " of " + std::to_string(plan_.incoming[i].bytes) + " bytes received)";
    }
    if (!text.empty()) return text;
    const std::string missing = unread();
    return "waiting for " + (missing.empty() ? "the ranks of this host" : missing) + " to read (" +
           std::to_string(produced_) + " of " + std::to_string(plan_.rounds[size_t(me_)]) +
           " rounds written)";
  }

 private:
  bool produce() {
    const int stream = streams_.inputs(me_);
    int64_t& total = plan_.rounds[size_t(me_)];
    if (produced_ == total || !streams_.room(stream)) return false;
    SlotHeader& header = streams_.header(stream);
    put_frame(header);
    uint64_t* lengths = streams_.lengths(stream);
    const size_t begin = size_t(produced_) * plan_.portion;
    int64_t needed = 1;
    for (int r = 0; r < n_; ++r) {
      if (r == me_) continue;
      const ConstSpan& block = plan_.outgoing[plan_.multicast ? 0 : size_t(r)];
      lengths[r] = block.bytes;
      needed = std::max(needed, rounds_for(block.bytes, plan_.portion));
      if (begin < block.bytes && (!plan_.multicast || r == (me_ == 0 ? 1 : 0))) {
        copy(streams_.data(stream) + place(r, me_, plan_.portion), block.data + begin,
             std::min(plan_.portion, block.bytes - begin));
      }
    }
    ++produced_;
    if (total == ShmCopyPlan::kUntilLast && produced_ == needed) total = needed;
    header.last = produced_ == total;
    streams_.publish(stream);
    return true;
  }

  bool consume(int r) {
    const size_t i = size_t(r);
    const int stream = streams_.inputs(r);
    if (!arrived(r, stream)) return false;
    const Span& block = plan_.incoming[i];
    if (consumed_[i] == 0) check(r, block.bytes);
    const size_t begin = size_t(consumed_[i]) * plan_.portion;
    if (begin < block.bytes) {
      copy(block.data + begin, streams_.front_data(stream) + place(me_, r, plan_.portion),
           std::min(plan_.portion, block.bytes - begin), plan_.streaming);
    }
    ++consumed_[i];
    const int64_t total = plan_.rounds[i];
    finished_[i] =
        total == ShmCopyPlan::kUntilLast ? streams_.front(stream).last != 0 : consumed_[i] == total;
    streams_.release(stream);
    return true;
  }

  ShmCopyPlan plan_;
  int64_t produced_ = 0;
  std::vector<int64_t> consumed_;
  std::vector<bool> finished_;
};

}  // namespace

std::unique_ptr<Stage> shm_copy(const LocalRanks& local, const FrameHeader& frame,
                                ShmCopyPlan plan) {
  return std::make_unique<ShmCopyStage>(local, frame, std::move(plan));
}

}  // namespace comm_core
