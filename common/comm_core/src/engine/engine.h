// The engine advances the operations of all queues of one process.
//
// One thread at a time drives it: the engine thread, or a caller that waits for an operation (which
// saves two context switches per small operation). The driver advances the most urgent operation
// that can make progress, chunk by chunk, and blocks in the kernel when none can. The engine thread
// serves peers (connections, messages, one-sided operations) while no operation of this process is
// in flight. Without events it uses no CPU time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "engine/op.h"
#include "engine/options.h"
#include "engine/queue.h"
#include "engine/turns.h"
#include "io/poller.h"
#include "transport/device.h"

namespace comm_core {

// Record of a finished operation, for traces.
struct Event {
  OpKind kind;
  DType dtype;
  int priority;
  uint64_t group;
  uint64_t sequence;
  uint64_t bytes;
  OpTimes times;
  bool ok;
};

// Interval in which no operation of this process was in flight, in seconds of now_s(). Before the
// first operation both ends are minus infinity.
struct Lull {
  double since_s = -std::numeric_limits<double>::infinity();
  double until_s = -std::numeric_limits<double>::infinity();
};

// Normally one per process. Groups share its ownership. It owns the device and the engine thread.
class Engine {
 public:
  explicit Engine(const Options& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Options& options() const { return options_; }
  // Returns whether this is a forked child of the process that made the engine. The child has
  // neither its thread nor its connections.
  bool forked() const { return forks_ != forks(); }
  // Throws AbortedError in a forked child.
  void check_process() const;
  // Ends the engine thread. Operations then advance only while a caller waits. Idempotent.
  void stop();

  // Thread-safe, for callers:
  // `wake`: see OpSpec.
  void submit(OpPtr op, bool wake);
  // Lets the engine thread take the operations that were submitted without waking it.
  void announce() { turns_.announce(); }
  // Blocks until `op` has finished. Returns false if `timeout_s` (> 0) passed first.
  bool wait(Op& op, double timeout_s);
  // Runs `work` between two steps of the engine, blocks until it has run, and rethrows its error.
  void call(const std::function<void()>& work);
  // Queues `work` like `call`, but does not wait. `work` must not throw.
  void run_soon(std::function<void()> work) { post(std::move(work), true); }
  // Destroys what finished operations kept alive, such as tensors, in the calling thread.
  void bury();
  // Returns the last finished operations, oldest first (at most 4096).
  std::vector<Event> events();
  // Returns when the last operation finished, in seconds of now_s(); minus infinity before the
  // first.
  double last_finished_s() const { return last_finished_s_; }
  // Returns the intervals without operations that ended (when an operation was submitted) later
  // than `after_s`, oldest first, at most the last 64.
  std::vector<Lull> lulls(double after_s);

  // Only within `call` or a step:
  Poller& poller() { return poller_; }
  // Returns the device of this process, made on first use. It listens at `host`, an address of this
  // host. Throws InvalidRequestError if it already listens at another.
  Device& device(const std::string& host);
  // Returns the device, or null if none was made.
  Device* device() { return device_.get(); }
  uint64_t dropped_connections() const;
  // Queues are not owned: each must remove itself before its end.
  void add(OpQueue* queue);
  void remove(OpQueue* queue);
  // Calls `warn` of all queues but `except`.
  void warn(const std::string& reason, const OpQueue* except = nullptr);
  // Ends `op` with `error` (null: success) after its epilogue, and calls its callbacks.
  void complete(const OpPtr& op, std::exception_ptr error);
  // Called when an operation has a priority other than 0. From now on less urgent operations are
  // held back, and sockets buffer few unsent bytes.
  void rank_by_priority();

 private:
  friend class Turns<Engine>;
  // The interface that Turns uses (see engine/turns.h).
  using Until = Op;
  using Mutex = std::mutex;
  using Flag = std::atomic<bool>;
  void take();
  bool pass();
  bool moved();
  bool under_way() const;
  double next_deadline_s();
  bool linger(const Op* until);
  void announce_sleep(bool asleep);
  void sleep(double until_s);
  void look() { poller_.wait(Watch::always, 0); }
  void nap(double until_s);
  void await(Op& op, double until_s);
  void wake() { poller_.wake(); }
  bool stopped() const { return stop_; }
  double now_s() const { return comm_core::now_s(); }

  bool spin();
  bool give_way(const Op& until);
  void post(std::function<void()> work, bool wake);

  const Options options_;
  const uint32_t forks_ = forks();
  const bool spin_allowed_;
  Poller poller_;
  std::unique_ptr<Device> device_;
  std::vector<OpQueue*> queues_;
  // The next operation of each queue, in a pass.
  struct Head {
    int priority;
    double enqueued_s;
    OpQueue* queue;
  };
  std::vector<Head> heads_;
  bool ranked_ = false;
  // Time until which less urgent operations send nothing. kNever: none is held back.
  double held_until_s_ = kNever;
  std::vector<OpQueue*> checked_;  // copy of queues_ while deadlines are checked
  int steps_ = 0;

  Turns<Engine> turns_{*this};
  std::mutex incoming_mutex_;
  std::vector<std::function<void()>> incoming_;

  std::mutex finished_mutex_;
  size_t under_way_ = 0;
  std::deque<Lull> lulls_;
  std::vector<std::shared_ptr<void>> graveyard_;
  std::vector<Event> events_;
  size_t next_event_ = 0;
  std::atomic<double> last_finished_s_{-std::numeric_limits<double>::infinity()};

  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace comm_core
