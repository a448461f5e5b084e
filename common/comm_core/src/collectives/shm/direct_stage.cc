#include <algorithm>

#include "collectives/shm/stages.h"

namespace comm_core {
namespace {

class ShmDirectStage : public ShmStage {
 public:
  ShmDirectStage(const LocalRanks& local, const FrameHeader& frame, ShmDirectPlan plan)
      : ShmStage(local, frame),
        plan_(std::move(plan)),
        heard_(size_t(n_)),
        held_(size_t(n_)),
        inputs_(size_t(n_)) {}

  Progress step() override {
    if (!others_.empty()) {
      const Progress theirs = others_[other_]->step();
      if (theirs != Progress::done) return theirs;
      return ++other_ == others_.size() ? Progress::done : Progress::moved;
    }
    if (working_) {
      // After a failure on a rank, its user may reuse the memory, so it must not be accessed.
      for (int r = 0; r < n_; ++r) {
        if (streams_.failed(r))
          throw PeerLostError("lost " + label(r) + ": the group failed there");
      }
      const size_t end = std::min(plan_.total, done_ + plan_.chunk);
      if (done_ < end) plan_.work(inputs_, done_, end);
      done_ = end;
      if (done_ == plan_.total) {
        working_ = false;
        round_ = kEnd;
      }
      return Progress::moved;
    }
    bool moved = false;
    if (!published_) {
      if (!publish()) return Progress::blocked;
      published_ = moved = true;
    }
    for (int r = 0; r < n_; ++r) {
      const int stream = streams_.inputs(r);
      if (r == me_ || heard_[size_t(r)] || !arrived(r, stream)) continue;
      hear(r);
      streams_.release(stream);
      heard_[size_t(r)] = moved = true;
    }
    if (std::count(heard_.begin(), heard_.end(), true) < n_ - 1) return progress(false, moved);
    std::fill(heard_.begin(), heard_.end(), false);
    published_ = false;
    if (!possible_) {
      // All ranks have the same information, so all choose `otherwise`.
      others_ = plan_.otherwise();
    } else if (round_ == kAnnounce) {
      round_ = kAgree;
    } else if (round_ == kAgree) {
      working_ = true;
    } else {
      return Progress::done;
    }
    return Progress::moved;
  }

  std::string status() const override {
    if (!others_.empty()) return others_[other_]->status();
    return "waiting for " + late([&](int r) { return heard_[size_t(r)]; }) + " (" +
           std::to_string(round_ == kEnd ? plan_.total : 0) + " of " + std::to_string(plan_.total) +
           " bytes done)";
  }

 private:
  // Rounds without payload: the location of the input; whether this rank could map all inputs; that
  // this rank has read all inputs.
  enum Round { kAnnounce, kAgree, kEnd };

  bool publish() {
    const int stream = streams_.inputs(me_);
    if (!streams_.room(stream)) return false;
    SlotHeader& header = streams_.header(stream);
    put_frame(header);
    header.last = round_ == kEnd;
    header.place = BufferPlace{};
    if (round_ == kAnnounce) {
      const auto place = SharedBuffers::instance().find(plan_.input.data, plan_.input.bytes);
      possible_ = place.has_value();
      if (place) {
        header.place = *place;
        inputs_[size_t(me_)] = const_cast<char*>(plan_.input.data);
      }
    } else if (round_ == kAgree) {
      possible_ = std::count(inputs_.begin(), inputs_.end(), nullptr) == 0;
      header.place.segment.place.pid = possible_ ? 1 : 0;
    }
    streams_.publish(stream);
    return true;
  }

  void hear(int r) {
    const SlotHeader& header = streams_.front(streams_.inputs(r));
    check_header(frame_, frame_of(header), label(r));
    if (round_ == kEnd) return;
    if (header.place.segment.place.pid == 0) {
      possible_ = false;
    } else if (round_ == kAnnounce) {
      held_[size_t(r)] = PeerBuffers::instance().map(header.place);
      inputs_[size_t(r)] = held_[size_t(r)].get();
    }
  }

  const ShmDirectPlan plan_;
  Round round_ = kAnnounce;
  bool published_ = false;
  std::vector<bool> heard_;
  std::vector<std::shared_ptr<char>> held_;  // keep the inputs of the others mapped
  std::vector<char*> inputs_;
  bool possible_ = true;  // no rank has reported so far that it is not
  bool working_ = false;
  size_t done_ = 0;  // bytes of the work
  Stages others_;    // run instead of the work; empty: none
  size_t other_ = 0;
};

}  // namespace

std::unique_ptr<Stage> shm_direct(const LocalRanks& local, const FrameHeader& frame,
                                  ShmDirectPlan plan) {
  return std::make_unique<ShmDirectStage>(local, frame, std::move(plan));
}

}  // namespace comm_core
