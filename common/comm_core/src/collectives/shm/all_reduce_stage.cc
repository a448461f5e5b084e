#include <algorithm>

#include "collectives/collectives.h"
#include "collectives/shm/stages.h"
#include "reduce/kernels.h"

namespace comm_core {
namespace {

class ShmAllReduceStage : public ShmStage {
 public:
  ShmAllReduceStage(const LocalRanks& local, const FrameHeader& frame, const ShmAllReducePlan& plan)
      : ShmStage(local, frame),
        plan_(plan),
        rounds_(rounds_for(plan.input.bytes, streams_.slot_bytes())),
        collected_(size_t(n_)) {}

  Progress step() override {
    bool moved = false, all = true;
    if (!plan_.flat) {
      for (int k = 1; k < n_; ++k) {
        const int r = (me_ + k) % n_;
        moved = collect(r) || moved;
        all = all && collected_[size_t(r)] == rounds_;
      }
    }
    moved = fold_round() || moved;
    moved = produce() || moved;
    return progress(all && folded_ == rounds_ && produced_ == rounds_, moved);
  }

  std::string status() const override {
    std::string missing = late([&](int r) { return streams_.ready(streams_.inputs(r)); });
    if (missing.empty()) missing = unread();
    return "waiting for " + (missing.empty() ? "the ranks of this host" : missing) + " (" +
           std::to_string(std::min(size_t(folded_) * streams_.slot_bytes(), plan_.input.bytes)) +
           " of " + std::to_string(plan_.input.bytes) + " bytes reduced)";
  }

 private:
  size_t round_bytes(int64_t j) const {
    const size_t begin = size_t(j) * streams_.slot_bytes();
    return std::min(streams_.slot_bytes(), plan_.input.bytes - std::min(begin, plan_.input.bytes));
  }

  // Returns the begin and end, in bytes, of local rank r's portion of round j.
  std::pair<size_t, size_t> portion(int64_t j, int r) const {
    const size_t bytes = round_bytes(j), n = size_t(n_);
    const size_t share = (bytes / n + 63) / 64 * 64;
    const size_t begin = std::min(bytes, size_t(r) * share);
    // The last rank gets the rest, which may be empty.
    const size_t end = r + 1 == n_ ? bytes : std::min(bytes, begin + share);
    return {begin, end};
  }

  bool produce() {
    const int stream = streams_.inputs(me_);
    if (produced_ == rounds_ || !streams_.room(stream)) return false;
    SlotHeader& header = streams_.header(stream);
    put_frame(header);
    const size_t begin = size_t(produced_) * streams_.slot_bytes();
    const size_t bytes = round_bytes(produced_);
    const char* from = plan_.input.data + begin;
    char* to = streams_.data(stream);
    if (plan_.flat) {
      copy(to, from, bytes);
    } else {
      const auto [mine, end] = portion(produced_, me_);
      copy(to, from, mine);
      copy(to + end, from + end, bytes - end);
    }
    header.last = ++produced_ == rounds_;
    streams_.publish(stream);
    return true;
  }

  bool fold_round() {
    if (folded_ == rounds_ || folded_ == produced_) return false;
    const int result = streams_.results(me_);
    if (!plan_.flat && !streams_.room(result)) return false;
    for (int w = 0; w < n_; ++w) {
      if (w != me_ && !arrived(w, streams_.inputs(w))) return false;
    }
    const auto [first, last] =
        plan_.flat ? std::pair<size_t, size_t>{0, round_bytes(folded_)} : portion(folded_, me_);
    const size_t begin = size_t(folded_) * streams_.slot_bytes() + first;
    std::vector<const void*> sources(size_t(n_), plan_.input.data + begin);
    for (int w = 0; w < n_; ++w) {
      if (w == me_) continue;
      if (folded_ == 0)
        check_header(frame_, frame_of(streams_.front(streams_.inputs(w))), label(w));
      sources[size_t(w)] = streams_.front_data(streams_.inputs(w)) + first;
    }
    if (last > first) {
      char* out = plan_.output.data + begin;
      fold(frame_, plan_.divisor, out, sources.data(), n_, last - first);
      if (!plan_.flat) copy(streams_.data(result) + first, out, last - first);
    }
    ++folded_;
    for (int w = 0; w < n_; ++w) {
      if (w != me_) streams_.release(streams_.inputs(w));
    }
    if (!plan_.flat) streams_.publish(result);
    return true;
  }

  bool collect(int r) {
    int64_t& done = collected_[size_t(r)];
    const int stream = streams_.results(r);
    // If the operation is in place, a result must not overwrite input that is not copied yet.
    if (done == rounds_ || done == produced_ || !arrived(r, stream)) return false;
    const auto [first, last] = portion(done, r);
    copy(plan_.output.data + size_t(done) * streams_.slot_bytes() + first,
         streams_.front_data(stream) + first, last - first);
    ++done;
    streams_.release(stream);
    return true;
  }

  const ShmAllReducePlan plan_;
  const int64_t rounds_;
  int64_t produced_ = 0, folded_ = 0;
  std::vector<int64_t> collected_;
};

}  // namespace

std::unique_ptr<Stage> shm_all_reduce(const LocalRanks& local, const FrameHeader& frame,
                                      const ShmAllReducePlan& plan) {
  return std::make_unique<ShmAllReduceStage>(local, frame, plan);
}

}  // namespace comm_core
