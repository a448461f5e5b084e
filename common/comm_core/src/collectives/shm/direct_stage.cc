#include "collectives/shm/direct_stage.h"

#include <algorithm>

namespace comm_core {

ShmDirectStage::ShmDirectStage(ShmStreams& streams, PeerBuffers& buffers, Plan plan,
                               std::vector<std::string> peers)
    : streams_(streams),
      buffers_(buffers),
      plan_(std::move(plan)),
      peers_(std::move(peers)),
      heard_(size_t(streams.size())),
      inputs_(size_t(streams.size())) {}

Progress ShmDirectStage::step() {
  if (other_ != nullptr) return other_->step();
  if (pass_ != nullptr) {
    const size_t end = std::min(pass_->total, done_ + pass_->chunk);
    if (done_ < end) pass_->work(inputs_, done_, end);
    done_ = end;
    if (done_ == pass_->total) {
      pass_ = nullptr;
      ++round_;
    }
    return Progress::moved;
  }
  bool moved = false;
  if (!published_) {
    if (!publish()) return Progress::blocked;
    published_ = moved = true;
  }
  for (int r = 0; r < streams_.size(); ++r) {
    const size_t i = size_t(r);
    if (r == streams_.me() || heard_[i]) continue;
    const int stream = streams_.inputs(r);
    if (streams_.ready(stream)) {
      hear(r);
      streams_.release(stream);
      heard_[i] = moved = true;
    } else if (streams_.left(r) && !streams_.ready(stream)) {
      throw PeerLostError("lost " + peers_[i] + ": it left the group");
    }
  }
  if (std::count(heard_.begin(), heard_.end(), true) < streams_.size() - 1) {
    return moved ? Progress::moved : Progress::blocked;
  }
  std::fill(heard_.begin(), heard_.end(), false);
  published_ = false;
  if (!possible_) {
    // All have heard the same, so all take the other way.
    other_ = plan_.otherwise();
  } else if (round_ == kAnnounce) {
    round_ = kAgree;
  } else if (round_ == last_round()) {
    return Progress::done;
  } else {
    pass_ = &plan_.passes[round_ - kAgree];
    done_ = 0;
  }
  return Progress::moved;
}

bool ShmDirectStage::publish() {
  const int stream = streams_.inputs(streams_.me());
  if (!streams_.room(stream)) return false;
  SlotHeader& header = streams_.header(stream);
  header.frame = plan_.frame;
  header.last = round_ == last_round();
  header.place = BufferPlace{};
  if (round_ == kAnnounce) {
    const auto place = SharedBuffers::instance().find(plan_.input.data, plan_.input.bytes);
    if (place) {
      header.place = *place;
      inputs_[size_t(streams_.me())] = const_cast<char*>(plan_.input.data);
    } else {
      possible_ = false;
    }
  } else if (round_ == kAgree) {
    const bool all =
        std::all_of(inputs_.begin(), inputs_.end(), [](char* input) { return input != nullptr; });
    header.place.pid = all ? 1 : 0;
    possible_ = all;
  }
  streams_.publish(stream);
  return true;
}

void ShmDirectStage::hear(int r) {
  const SlotHeader& header = streams_.front(streams_.inputs(r));
  check_header(plan_.frame, header.frame, peers_[size_t(r)]);
  if (round_ == kAnnounce) {
    if (header.place.pid == 0) {
      possible_ = false;
    } else {
      inputs_[size_t(r)] = buffers_.map(header.place);
    }
  } else if (round_ == kAgree && header.place.pid == 0) {
    possible_ = false;
  }
}

std::string ShmDirectStage::status() const {
  if (other_ != nullptr) return other_->status();
  std::string late;
  for (int r = 0; r < streams_.size(); ++r) {
    if (r == streams_.me() || heard_[size_t(r)]) continue;
    late += (late.empty() ? "" : ", ") + peers_[size_t(r)];
  }
  size_t done = 0, total = 0;
  for (size_t i = 0; i < plan_.passes.size(); ++i) {
    total += plan_.passes[i].total;
    if (round_ > kAgree + i) done = total;
  }
  return "waiting for " + late + " (" + std::to_string(done) + " of " + std::to_string(total) +
         " bytes done)";
}

}  // namespace comm_core
