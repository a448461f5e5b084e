// An operation: the request of a caller, and the state that the caller and the engine share.
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
#include "engine/flight.h"
#include "engine/stage.h"

namespace comm_core {

class Engine;
class OpQueue;

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

// Returns whether `kind` involves two ranks only. Such operations have no position in the order of
// the collectives, and no sequence number.
inline bool point_to_point(OpKind kind) { return kind >= OpKind::send; }

inline bool reduces(OpKind kind) {
  return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter || kind == OpKind::reduce;
}

// Returns "all_reduce #12 (float32, sum, 400 bytes)" for a call with `bytes` bytes on all ranks.
std::string describe(OpKind kind, DType dtype, ReduceOp op, int root, uint64_t sequence,
                     uint64_t bytes);

// Request of an operation. The caller owns the memory and keeps it alive until the operation has
// finished. Inputs and outputs by kind, for a group of n ranks (empty spans are allowed
// everywhere):
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
  double timeout_s = 0;  // 0: the timeout of the group
  int peer = -1;         // of point-to-point operations; -1 in recv: any source
  uint64_t tag = 0;      // send, recv
  uint32_t window = 0;   // window, slot and offset: location at the target of a one-sided operation
  uint32_t slot = 0;
  uint64_t offset = 0;  // bytes
  bool held = false;    // starts only after Group::release: its input is not ready yet
  // false: the caller waits for it soon, and so drives the engine itself, or announces it.
  bool wake = true;
  // Runs in the engine when the result is complete. Each call does a part; the last returns true.
  std::function<bool()> epilogue;
  std::shared_ptr<void> keep_alive;  // held until the end; destroyed in a caller's thread
};

// Returns the bytes of the whole operation, the blocks of all ranks, in a group of `size` ranks.
uint64_t total_bytes(const OpSpec& spec, int size);

struct OpTimes {
  double enqueued_s = 0;  // all in seconds of now_s(); 0: not yet
  double started_s = 0;
  double finished_s = 0;
};

// What the queue of an operation keeps with it.
struct OpState {
  // Set before Engine::submit. The first: of all operations of its queue.
  uint64_t number = 0, context = 0;  // see group/callback_order.h
  uint64_t sequence = 0;             // of the collectives of its queue
  int depth = 0;
  // Only for the thread that drives the engine:
  Stages stages;
  size_t stage = 0;
  double deadline_s = 0;
  int source = -1;
  bool held = false;
  bool shown = false;     // reported to rank 0, because it takes long
  bool followed = false;  // the epilogue has run completely
};

// Handle of an operation, shared by the caller and the engine. It keeps its queue alive. Its public
// functions are thread-safe, but for those of its queue.
class Op {
 public:
  Op(OpSpec spec, Engine* engine, std::shared_ptr<OpQueue> queue);
  ~Op();

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Like done(), for callers that do not wait: the operation will end without them.
  bool ends() const;
  // Blocks until the operation has finished or failed. Returns false if `timeout_s` (> 0) passed
  // first. Throws AbortedError in a forked child.
  bool wait(double timeout_s = 0);
  // Returns the error, or null. Valid only after done().
  std::exception_ptr error() const { return error_; }
  // Calls `callback` at the end, in the thread that drives the engine, or at once if it is done.
  void on_done(std::function<void()> callback);
  // Valid only after done().
  OpTimes times() const { return times_; }
  uint64_t sequence() const { return state_.sequence; }
  int source() const { return state_.source; }  // of a recv: the sending rank
  const OpSpec& spec() const { return spec_; }
  OpQueue& queue() const { return *queue_; }
  uint64_t number() const { return state_.number; }  // of all operations of its queue
  // Returns 0 for the program's operations, and one more for those that callbacks of such submit.
  int depth() const { return state_.depth; }
  // Returns "all_reduce #12 (float32, sum, 25000000 bytes) on rank 0 of group x".
  std::string describe() const;
  uint64_t total_bytes() const;

  // For its queue:
  OpState& state() { return state_; }
  const OpState& state() const { return state_; }
  // Notes that it starts now. `timeout_s` is that of the queue, if the caller has set none.
  void begin(double timeout_s);

 private:
  friend class Engine;

  // Returns the callbacks that it has called, to be destroyed in a caller's thread.
  std::vector<std::function<void()>> finish(std::exception_ptr error);

  OpSpec spec_;
  Engine* engine_;
  std::shared_ptr<OpQueue> queue_;
  OpState state_;
  OpTimes times_;
  FlightEntry flight_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void()>> callbacks_;
};

using OpPtr = std::shared_ptr<Op>;

// Returns the latest finish time, in seconds of now_s(), of the operations that this thread has
// waited for; minus infinity if none.
double last_awaited_s();
// Records that this thread has waited, without Op::wait, for all operations finished by then.
void note_awaited(double finished_s);

}  // namespace comm_core
