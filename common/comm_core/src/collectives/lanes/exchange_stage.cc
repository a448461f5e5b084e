#include <algorithm>

#include "collectives/lanes/lanes.h"
#include "collectives/lanes/stages.h"

namespace comm_core {
namespace {

constexpr size_t kHeader = sizeof(FrameHeader);

struct Transfer {
  int peer;
  char* data;
  size_t bytes;
  size_t done = 0;  // bytes, including the header
  bool finished = false;
  FrameReader reader;
};

class ExchangeStage : public Stage {
 public:
  ExchangeStage(Lanes& lanes, const FrameHeader& frame, const std::vector<Sending>& sending,
                const std::vector<Receiving>& receiving)
      : lanes_(lanes), frame_(frame) {
    for (const Sending& s : sending) {
      out_.push_back({s.peer, const_cast<char*>(s.block.data), s.block.bytes});
    }
    for (const Receiving& r : receiving) in_.push_back({r.peer, r.block.data, r.block.bytes});
  }

  Progress step() override {
    bool moved = false, all = true;
    for (Transfer& transfer : out_) {
      if (!transfer.finished) moved = send(transfer) || moved;
      all = all && transfer.finished;
    }
    for (Transfer& transfer : in_) {
      if (!transfer.finished) moved = receive(transfer) || moved;
      all = all && transfer.finished;
    }
    return progress(all, moved);
  }

  std::string status() const override {
    for (const std::vector<Transfer>* transfers : {&in_, &out_}) {
      for (const Transfer& t : *transfers) {
        if (t.finished) continue;
        return "waiting for " + lanes_.label(t.peer) + " (" +
               std::to_string(t.done - std::min(t.done, kHeader)) + " of " +
               std::to_string(t.bytes) + " bytes " + (transfers == &in_ ? "received)" : "sent)");
      }
    }
    return "nobody";
  }

 private:
  bool send(Transfer& t) {
    Lane& lane = lanes_.out(t.peer);
    if (!lane.ready()) return false;
    FrameHeader header = frame_;
    header.payload_bytes = t.bytes;
    iovec parts[2];
    int num_parts = 0;
    if (t.done < kHeader) {
      parts[num_parts++] = {reinterpret_cast<char*>(&header) + t.done, kHeader - t.done};
    }
    const size_t body = t.done < kHeader ? 0 : t.done - kHeader;
    if (body < t.bytes) {
      parts[num_parts++] = {t.data + body, std::min(t.bytes - body, lanes_.chunk())};
    }
    const size_t sent = lanes_.write(lane, parts, num_parts);
    t.done += sent;
    t.finished = t.done == kHeader + t.bytes;
    return sent > 0;
  }

  bool receive(Transfer& t) {
    Lane* lane = lanes_.in(t.peer);
    if (lane == nullptr) return false;
    const bool begins = t.done < kHeader;
    if (begins) {
      if (!t.reader.expect(*lane, frame_, t.bytes)) return false;
      lanes_.meet_peer();
      t.done = kHeader;
      t.finished = t.bytes == 0;
      if (t.finished) return true;
    }
    const size_t body = t.done - kHeader;
    const size_t got = lane->read(t.data + body, std::min(t.bytes - body, lanes_.chunk()));
    t.done += got;
    t.finished = t.done == kHeader + t.bytes;
    return got > 0 || begins;
  }

  Lanes& lanes_;
  const FrameHeader frame_;
  std::vector<Transfer> out_, in_;
};

}  // namespace

std::unique_ptr<Stage> exchange(Lanes& lanes, const FrameHeader& frame,
                                const std::vector<Sending>& sending,
                                const std::vector<Receiving>& receiving) {
  return std::make_unique<ExchangeStage>(lanes, frame, sending, receiving);
}

}  // namespace comm_core
