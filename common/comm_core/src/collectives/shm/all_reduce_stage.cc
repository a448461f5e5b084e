#include "collectives/shm/all_reduce_stage.h"

#include <algorithm>

#include "collectives/shm/copy_stage.h"
#include "reduce/kernels.h"

namespace comm_core {

ShmAllReduceStage::ShmAllReduceStage(ShmStreams& streams, ShmAllReducePlan plan,
                                     std::vector<std::string> peers)
    : streams_(streams),
      plan_(std::move(plan)),
      peers_(std::move(peers)),
      rounds_(ShmCopyStage::rounds_for(plan_.input.bytes, streams.slot_bytes())),
      collected_(size_t(streams.size())) {}

size_t ShmAllReduceStage::round_bytes(int64_t j) const {
  const size_t begin = size_t(j) * streams_.slot_bytes();
  return std::min(streams_.slot_bytes(), plan_.input.bytes - std::min(begin, plan_.input.bytes));
}

std::pair<size_t, size_t> ShmAllReduceStage::portion(int64_t j, int r) const {
  const size_t bytes = round_bytes(j), n = size_t(streams_.size());
  const size_t share = (bytes / n + 63) / 64 * 64;
  const size_t begin = std::min(bytes, size_t(r) * share);
  // The last takes what is left; it may be none.
  const size_t end = r + 1 == streams_.size() ? bytes : std::min(bytes, begin + share);
  return {begin, end};
}

Progress ShmAllReduceStage::step() {
  bool moved = false, all = true;
  const int n = streams_.size();
  if (!plan_.flat) {
    for (int k = 1; k < n; ++k) {
      const int r = (streams_.me() + k) % n;
      moved = collect(r) || moved;
      all = all && collected_[size_t(r)] == rounds_;
    }
  }
  moved = fold() || moved;
  moved = produce() || moved;
  if (all && folded_ == rounds_ && produced_ == rounds_) return Progress::done;
  return moved ? Progress::moved : Progress::blocked;
}

bool ShmAllReduceStage::produce() {
  const int me = streams_.me();
  const int stream = streams_.inputs(me);
  if (produced_ == rounds_ || !streams_.room(stream)) return false;
  SlotHeader& header = streams_.header(stream);
  header.frame = plan_.frame;
  const size_t begin = size_t(produced_) * streams_.slot_bytes();
  const size_t bytes = round_bytes(produced_);
  const char* from = plan_.input.data + begin;
  char* to = streams_.data(stream);
  if (plan_.flat) {
    copy(to, from, bytes);
  } else {
    const auto [mine, end] = portion(produced_, me);
    copy(to, from, mine);
    copy(to + end, from + end, bytes - end);
  }
  header.last = ++produced_ == rounds_;
  streams_.publish(stream);
  return true;
}

bool ShmAllReduceStage::fold() {
  const int n = streams_.size(), me = streams_.me();
  if (folded_ == rounds_ || folded_ == produced_) return false;
  const int result = streams_.results(me);
  if (!plan_.flat && !streams_.room(result)) return false;
  for (int w = 0; w < n; ++w) {
    if (w == me || streams_.ready(streams_.inputs(w))) continue;
    wait_check(w);
    return false;
  }
  const auto [first, last] =
      plan_.flat ? std::pair<size_t, size_t>{0, round_bytes(folded_)} : portion(folded_, me);
  const size_t begin = size_t(folded_) * streams_.slot_bytes() + first;
  std::vector<const void*> sources(size_t(n), nullptr);
  for (int w = 0; w < n; ++w) {
    if (w == me) {
      sources[size_t(w)] = plan_.input.data + begin;
    } else {
      if (folded_ == 0) check_frame(w);
      sources[size_t(w)] = streams_.front_data(streams_.inputs(w)) + first;
    }
  }
  const size_t bytes = last - first;
  if (bytes > 0) {
    const size_t count = bytes / size_of(plan_.dtype);
    char* out = plan_.output.data + begin;
    reduce(plan_.dtype, plan_.op, out, sources.data(), n, count);
    if (plan_.divisor > 0) divide(plan_.dtype, out, count, plan_.divisor);
    if (!plan_.flat) copy(streams_.data(result) + first, out, bytes);
  }
  ++folded_;
  for (int w = 0; w < n; ++w) {
    if (w != me) streams_.release(streams_.inputs(w));
  }
  if (!plan_.flat) streams_.publish(result);
  return true;
}

bool ShmAllReduceStage::collect(int r) {
  int64_t& done = collected_[size_t(r)];
  // In place, a result may overwrite only what this rank has staged.
  if (done == rounds_ || done == produced_) return false;
  const int stream = streams_.results(r);
  if (!streams_.ready(stream)) {
    if (streams_.left(r) && !streams_.ready(stream)) {
      throw PeerLostError("lost " + peers_[size_t(r)] + ": it left the group");
    }
    return false;
  }
  const auto [first, last] = portion(done, r);
  copy(plan_.output.data + size_t(done) * streams_.slot_bytes() + first,
       streams_.front_data(stream) + first, last - first);
  ++done;
  streams_.release(stream);
  return true;
}

void ShmAllReduceStage::check_frame(int w) {
  check_header(plan_.frame, streams_.front(streams_.inputs(w)).frame, peers_[size_t(w)]);
}

void ShmAllReduceStage::wait_check(int w) const {
  if (streams_.left(w) && !streams_.ready(streams_.inputs(w))) {
    throw PeerLostError("lost " + peers_[size_t(w)] + ": it left the group");
  }
}

std::string ShmAllReduceStage::status() const {
  std::string late;
  for (int w = 0; w < streams_.size(); ++w) {
    if (w == streams_.me() || streams_.ready(streams_.inputs(w))) continue;
    late += (late.empty() ? "" : ", ") + peers_[size_t(w)];
  }
  return "waiting for " + (late.empty() ? "the ranks of this host" : late) + " (" +
         std::to_string(std::min(size_t(folded_) * streams_.slot_bytes(), plan_.input.bytes)) +
         " of " + std::to_string(plan_.input.bytes) + " bytes reduced)";
}

}  // namespace comm_core
