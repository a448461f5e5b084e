// One operation: what a caller asks for, and the state that he and the engine share.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/errors.h"
#include "base/types.h"

namespace comm_core {

class Engine;
class Group;
class Stage;

enum class OpKind : uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  reduce,
  gather,
  scatter,
  all_to_all,
  barrier,
  send,
  recv,
  put,
  get,
  accumulate,
  lock,
  unlock,
};

const char* name(OpKind kind);

// Between two ranks, and so without a place in the order of the collectives.
inline bool point_to_point(OpKind kind) { return kind >= OpKind::send; }

inline bool reduces(OpKind kind) {
  return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter || kind == OpKind::reduce;
}

// inputs and outputs by kind, for a group of n ranks (spans of zero bytes are allowed everywhere):
//   all_reduce      inputs[0], outputs[0] of the same size; may be the same memory
//   reduce_scatter  inputs[n] (block i goes to rank i), outputs[0]; outputs[0] may be inputs[rank]
//   all_gather      inputs[0], outputs[n]; inputs[0] may be outputs[rank]
//   broadcast       outputs[0], in place
//   reduce          inputs[0]; outputs[0] on the root, may be the same memory
//   gather          inputs[0]; outputs[n] on the root
//   scatter         inputs[n] on the root; outputs[0]
//   all_to_all      inputs[n], outputs[n]; nothing overlaps
//   barrier         nothing
//   send, put, accumulate  inputs[0];  recv, get  outputs[0];  lock, unlock  nothing
struct OpSpec {
  OpKind kind = OpKind::barrier;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  std::vector<ConstSpan> inputs;
  std::vector<Span> outputs;
  int priority = 0;      // higher goes first; operations of one group still run in order
  double timeout_s = 0;  // 0: the group's
  int peer = -1;         // send, recv, windows; -1 in recv: any source
  uint64_t tag = 0;      // send, recv
  uint32_t window = 0;   // one-sided operations: where at the peer
  uint32_t slot = 0;
  uint64_t offset = 0;  // bytes
  bool held = false;    // starts only after Group::release: its input is still being made
  bool wake = true;     // false: the caller waits at once and will do the work himself
  // Runs in the engine when the result is there, a part at each call; true after the last.
  std::function<bool()> epilogue;
  std::shared_ptr<void> keep_alive;  // let go of only in a caller's thread
};

struct OpTimes {
  double enqueued_s = 0;  // all on now_s()
  double started_s = 0;
  double finished_s = 0;
};

class Op {
 public:
  Op(OpSpec spec, Engine* engine, std::shared_ptr<Group> group);
  ~Op();

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Blocks until the operation has ended. False if timeout_s (> 0) passed first.
  bool wait(double timeout_s = 0);
  // The failure, or null. Only after done().
  std::exception_ptr error() const { return error_; }
  // Calls back in the engine's thread when it has ended; at once if it has ended already.
  void on_done(std::function<void()> callback);
  // Only after done().
  OpTimes times() const { return times_; }
  uint64_t sequence() const { return sequence_; }
  int source() const { return source_; }
  const OpSpec& spec() const { return spec_; }
  // "all_reduce #12 (float32, sum, 25000000 bytes)".
  std::string describe() const;

 private:
  friend class Engine;
  friend class Group;
  friend class Messenger;

  // Returns the callbacks it has called, for the graveyard.
  std::vector<std::function<void()>> finish(std::exception_ptr error);

  OpSpec spec_;
  Engine* engine_;
  std::shared_ptr<Group> group_;
  uint64_t sequence_ = 0;
  int source_ = -1;
  std::vector<std::unique_ptr<Stage>> stages_;
  size_t stage_ = 0;
  OpTimes times_;
  double deadline_s_ = 0;
  bool held_ = false;
  bool shown_ = false;     // to rank 0, because it takes long
  bool followed_ = false;  // by all of its epilogue
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void()>> callbacks_;
};

using OpPtr = std::shared_ptr<Op>;

// When the last of the operations finished that this thread has waited for; minus infinity before.
double last_awaited_s();
// This thread has waited, by other means than Op::wait, for all that has finished by then.
void note_awaited(double finished_s);

}  // namespace comm_core
