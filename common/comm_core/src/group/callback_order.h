// Order of the collectives of a group when callbacks of futures start collectives, too.
//
// The collectives of a group run in the order of their submission, which must be the same on all
// ranks. But callbacks run in threads of their own, at another time on each rank. So an operation
// that is submitted after the future of an earlier one was asked for waits until the callbacks of
// that future have returned, together with the operations that they have started: the order is that
// of a program that runs the callbacks at once.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "engine/op.h"

namespace comm_core {

// Not thread-safe. The caller numbers the operations from 1 on. The context of an operation is the
// number of the one whose callbacks have submitted it, or kProgram.
class CallbackOrder {
 public:
  static constexpr uint64_t kProgram = 0;

  // Returns true, and keeps `op`, if it must wait for callbacks.
  bool keep(uint64_t number, uint64_t context, const OpPtr& op, double deadline_s);
  // The future of the operation was asked for: later ones of its context wait for `close`.
  void open(uint64_t number, uint64_t context);
  // The callbacks have returned. Returns the operations that may start now, in this order.
  std::vector<OpPtr> close(uint64_t number);
  // Returns all operations that wait. Later ones do not wait.
  std::vector<OpPtr> end();
  // Returns the first deadline of the operations that wait; kNever if there is none.
  double deadline_s() const;

 private:
  struct Kept {
    uint64_t number;
    OpPtr op;
    double deadline_s;
    bool opens = false;  // its future was asked for
  };
  struct Context {
    uint64_t parent = kProgram;
    bool running = false;  // its callbacks have not returned
    size_t open = 0;       // its operations whose contexts are in the map
    std::deque<Kept> kept;
  };
  void begin(uint64_t number, uint64_t context);

  std::map<uint64_t, Context> contexts_;
  bool ended_ = false;
};

}  // namespace comm_core
