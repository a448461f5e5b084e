#include "collectives/tcp/exchange_stage.h"

#include <algorithm>

#include "group/group.h"

namespace comm_core {

ExchangeStage::ExchangeStage(Group& group, FrameHeader frame, std::vector<Sending> sending,
                             std::vector<Receiving> receiving)
    : group_(group), frame_(frame) {
  for (const Sending& s : sending) {
    out_.push_back({s.peer, const_cast<char*>(s.block.data), s.block.bytes});
  }
  for (const Receiving& r : receiving) in_.push_back({r.peer, r.block.data, r.block.bytes});
}

Progress ExchangeStage::step() {
  bool moved = false, all = true;
  for (Transfer& transfer : out_) {
    if (!transfer.finished) moved = send(transfer) || moved;
    all = all && transfer.finished;
  }
  for (Transfer& transfer : in_) {
    if (!transfer.finished) moved = receive(transfer) || moved;
    all = all && transfer.finished;
  }
  if (all) return Progress::done;
  return moved ? Progress::moved : Progress::blocked;
}

bool ExchangeStage::send(Transfer& t) {
  OutLink& link = group_.out(t.peer);
  if (!link.ready()) return false;
  FrameHeader header = frame_;
  header.payload_bytes = t.bytes;
  constexpr size_t kHeader = sizeof header;
  iovec parts[2];
  int num_parts = 0;
  if (t.done < kHeader) {
    parts[num_parts++] = {reinterpret_cast<char*>(&header) + t.done, kHeader - t.done};
  }
  const size_t body = t.done < kHeader ? 0 : t.done - kHeader;
  if (body < t.bytes) {
    parts[num_parts++] = {t.data + body, std::min(t.bytes - body, group_.options().tcp_chunk)};
  }
  const size_t sent = link.write(parts, num_parts);
  t.done += sent;
  t.finished = t.done == kHeader + t.bytes;
  return sent > 0;
}

bool ExchangeStage::receive(Transfer& t) {
  InLink* link = group_.in(t.peer);
  if (link == nullptr) return false;
  constexpr size_t kHeader = sizeof(FrameHeader);
  const bool begins = t.done < kHeader;
  if (begins) {
    if (!link->read_header()) return false;
    FrameHeader mine = frame_;
    mine.payload_bytes = t.bytes;
    check_header(mine, link->header(), link->peer());
    link->next_frame();
    t.done = kHeader;
    t.finished = t.bytes == 0;
    if (t.finished) return true;
  }
  const size_t body = t.done - kHeader;
  const size_t got =
      link->read(t.data + body, std::min(t.bytes - body, group_.options().tcp_chunk));
  t.done += got;
  t.finished = t.done == kHeader + t.bytes;
  return got > 0 || begins;
}

std::string ExchangeStage::status() const {
  for (const Transfer& t : in_) {
    if (t.finished) continue;
    return "waiting for " + group_.peer(t.peer).label + " (" +
           std::to_string(t.done - std::min(t.done, sizeof(FrameHeader))) + " of " +
           std::to_string(t.bytes) + " bytes received)";
  }
  for (const Transfer& t : out_) {
    if (t.finished) continue;
    return "waiting for " + group_.peer(t.peer).label + " (" +
           std::to_string(t.done - std::min(t.done, sizeof(FrameHeader))) + " of " +
           std::to_string(t.bytes) + " bytes sent)";
  }
  return "nobody";
}

}  // namespace comm_core
