// Streams of rounds through shared memory between the ranks of one host.
//
// Every local rank owns two streams. It writes rounds into the stream's slots and publishes them;
// the others read each round and release it; a slot is written again when all have. Counters only
// grow, across operations, so no barrier is needed between two of them. Who waits does so without
// spinning: he raises a flag, and whoever publishes or releases rings his doorbell.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/poller.h"
#include "base/store.h"
#include "shm/buffers.h"
#include "shm/segment.h"

namespace comm_core {

struct SlotHeader {
  // What the sender says of the round, in words of those who use the streams.
  static constexpr size_t kFrameBytes = 40;
  alignas(8) char frame[kFrameBytes];
  uint32_t last;  // the stream's last round in this operation
  uint32_t pad;
  BufferPlace place;  // of the sender's input, where stages read it in place
};

class ShmStreams : public Watcher {
 public:
  static constexpr uint64_t kSlots = 2;

  // Collective over the ranks of this host. `ranks`: their ranks in the group; `me`: place therein.
  // `slot_bytes` 0: chosen by the first of them. Throws SystemError, then on all of them, if the
  // first finds no memory.
  ShmStreams(Store& store, const std::vector<int>& ranks, int me, size_t slot_bytes);
  // When it has been made on all of them: opens their doorbells. Throws SystemError.
  void connect(Store& store, const std::vector<int>& ranks);
  // When that has been done by all.
  void connected() { memory_.reset(); }
  ~ShmStreams() override;

  int size() const { return n_; }
  int me() const { return me_; }
  size_t slot_bytes() const { return slot_bytes_; }
  // Streams: `inputs(r)` and `results(r)` of local rank r.
  int inputs(int r) const { return r; }
  int results(int r) const { return n_ + r; }

  // Of one's own streams: is there a free slot; the slot; make it visible.
  bool room(int stream);
  SlotHeader& header(int stream) { return *slot(stream, written_[size_t(stream)]).header; }
  uint64_t* lengths(int stream) { return slot(stream, written_[size_t(stream)]).lengths; }
  char* data(int stream) { return slot(stream, written_[size_t(stream)]).data; }
  void publish(int stream);

  // Of the others' streams: is a round there; the round; done with it.
  bool ready(int stream) const;
  const SlotHeader& front(int stream) { return *slot(stream, read_[size_t(stream)]).header; }
  const uint64_t* front_lengths(int stream) { return slot(stream, read_[size_t(stream)]).lengths; }
  const char* front_data(int stream) { return slot(stream, read_[size_t(stream)]).data; }
  void release(int stream, uint64_t rounds = 1);

  // Whether local rank r has left the group, or that has failed there.
  bool left(int r) const;
  bool failed(int r) const;
  void leave() { go(1); }
  void fail() { go(2); }

  void announce_sleep(bool asleep);
  int doorbell() const { return bell_.get(); }
  void on_event() override;

 private:
  struct Slot {
    SlotHeader* header;
    uint64_t* lengths;
    char* data;
  };
  struct Facts;  // of one rank, in shared memory

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
  Fd memory_;  // until all have opened it
  Mapping mapping_;
  Fd bell_, ring_;  // both ends of a pipe
  std::vector<Fd> bells_;
  std::vector<uint64_t> written_, read_, free_from_;
};

}  // namespace comm_core
