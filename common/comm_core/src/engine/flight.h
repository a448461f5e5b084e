// The flight recorder: the last operations of this process, in a ring of fixed size. The ring may
// lie in a file, which other processes can read when this one has stopped or died.
#pragma once

#include <cstdint>
#include <string>

namespace comm_core {

class Op;

// An operation in the ring. `dear/comm/flight/recorder.py` reads and writes the same layout.
struct FlightSlot {
  uint64_t record;  // 1, 2, ...; 0 while the slot is being written
  uint64_t group;
  uint64_t sequence;  // 0: not a collective
  uint64_t input_bytes, output_bytes;
  uint64_t input_at, output_at;             // addresses, by which the reader knows buffers
  double created_s, started_s, finished_s;  // in seconds of now_s(); 0: not yet
  int32_t peer, failed;                     // peer: the root or the other rank; -1: none
  char operation[20], dtype[20];
};

// The place of an operation in the ring, until later operations need it.
class FlightEntry {
 public:
  void note(const Op& op);
  void started(double at_s);
  void finished(double at_s, bool failed);

 private:
  bool kept() const;
  FlightSlot* slot_ = nullptr;
  uint64_t record_ = 0;
};

// Lets the ring lie in a new file at `path` from now on, or in no file if `path` is empty. Throws
// SystemError.
void record_flight(const std::string& path);

}  // namespace comm_core
