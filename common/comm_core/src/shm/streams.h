// Streams of rounds through shared memory between the ranks of one host.
//
// Every local rank owns two streams. It writes rounds into the slots of a stream and publishes
// them. The other ranks read each round and release it, and the slot is reused when all have
// released it. The counters of rounds are never reset, so operations need no barrier between them.
// A rank sleeps while it waits: it sets a flag, and a rank that publishes or releases a round then
// writes to the pipe ("doorbell") that wakes it.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/store.h"
#include "io/poller.h"
#include "shm/buffers.h"
#include "shm/segment.h"

namespace comm_core {

struct SlotHeader {
  // The bytes of the sender's FrameHeader (see collectives/frame.h).
  static constexpr size_t kFrameBytes = 48;
  alignas(8) char frame[kFrameBytes];
  uint32_t last;  // 1 in the stream's last round of this operation
  uint32_t pad;
  BufferPlace place;  // the sender's input, for stages that read it in place
};

class ShmStreams : public Watcher {
 public:
  static constexpr uint64_t kSlots = 2;  // per stream

  // Must be called by all ranks of this host. `ranks` are their ranks in the group, `me` is the
  // index of this rank in it. With `slot_bytes` 0 the first of them chooses the size. If the first
  // cannot allocate the memory, all of them throw SystemError.
  ShmStreams(Store& store, const std::vector<int>& ranks, int me, size_t slot_bytes);
  // Opens the doorbells of the others, after all ranks have constructed it. Throws SystemError.
  void connect(Store& store, const std::vector<int>& ranks);
  // Closes the descriptor of the segment, after `connect` has returned on all ranks.
  void connected() { memory_.reset(); }
  ~ShmStreams() override;

  int size() const { return n_; }
  int me() const { return me_; }
  size_t slot_bytes() const { return slot_bytes_; }
  // Return the numbers of the two streams of local rank r.
  int inputs(int r) const { return r; }
  int results(int r) const { return n_ + r; }

  // Writing to this rank's streams: whether a slot is free, the parts of that slot, and publication
  // of the round in it.
  bool room(int stream);
  // Whether rank r has released so many rounds of this rank's stream that a slot is free.
  bool room_of(int r, int stream);
  SlotHeader& header(int stream) { return *slot(stream, written_[size_t(stream)]).header; }
  uint64_t* lengths(int stream) { return slot(stream, written_[size_t(stream)]).lengths; }
  char* data(int stream) { return slot(stream, written_[size_t(stream)]).data; }
  void publish(int stream);

  // Reading the others' streams: whether a round is published, its parts (valid until its release),
  // and its release.
  bool ready(int stream) const;
  const SlotHeader& front(int stream) { return *slot(stream, read_[size_t(stream)]).header; }
  const uint64_t* front_lengths(int stream) { return slot(stream, read_[size_t(stream)]).lengths; }
  const char* front_data(int stream) { return slot(stream, read_[size_t(stream)]).data; }
  void release(int stream, uint64_t rounds = 1);

  // Return whether local rank r has left the group, and whether the group has failed there.
  bool left(int r) const;
  bool failed(int r) const;
  // Report to the others that this rank has left, or that the group has failed here.
  void leave() { go(1); }
  void fail() { go(2); }

  // Sets the flag that makes the others ring this rank's doorbell. The caller must check the
  // streams once more between the announcement and its sleep.
  void announce_sleep(bool asleep);
  int doorbell() const { return bell_.get(); }
  void on_event() override;

 private:
  struct Slot {
    SlotHeader* header;
    uint64_t* lengths;
    char* data;
  };
  struct Facts;  // state of one rank, in shared memory

  size_t choose_slot();
  void make(Store& store, const std::string& key, size_t slot_bytes);
  void lay_out(size_t slot_bytes);
  Slot slot(int stream, uint64_t round);
  std::atomic<uint64_t>& published(int stream) const;
  std::atomic<uint64_t>& released(int reader, int stream);
  Facts& facts(int r) const;
  void wake(int r);
  void go(uint32_t how);

  int n_, me_;
  size_t slot_bytes_ = 0, slot_stride_ = 0, counters_offset_ = 0, slots_offset_ = 0, total_ = 0;
  Fd memory_;  // of the segment, open until `connected`
  Mapping mapping_;
  Fd bell_, ring_;  // read and write end of this rank's doorbell
  std::vector<Fd> bells_;
  std::vector<uint64_t> written_, read_, free_from_;
};

}  // namespace comm_core
