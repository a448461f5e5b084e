// Advances the operations of all groups of one process.
//
// One thread at a time drives: the engine's own, or a caller who waits for an operation and would
// otherwise only sleep (which saves two context switches per small operation). The driver advances
// the most urgent operation that can move, chunk by chunk, and blocks in the kernel when none can.
// The engine's own thread answers peers (connections, messages, one-sided operations) while no
// operation of this process is under way; without events it uses no processor time.
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
#include "base/poller.h"
#include "engine/op.h"
#include "engine/options.h"
#include "engine/turns.h"
#include "transport/device.h"

namespace comm_core {

class Group;

// One finished operation, for traces.
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

// A time without an operation of this process under way, on now_s(); empty before the first.
struct Lull {
  double since_s = -std::numeric_limits<double>::infinity();
  double until_s = -std::numeric_limits<double>::infinity();
};

class Engine {
 public:
  explicit Engine(const Options& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Options& options() const { return options_; }
  // This process is a child of the one that made the engine, whose thread and connections it lacks.
  bool forked() const { return forks_ != forks(); }
  // Throws AbortedError where it is.
  void check_process() const;
  // Ends the engine's own thread; operations then go on only while somebody waits. Idempotent.
  void stop();

  // From any thread of a caller:
  void submit(OpPtr op);
  bool wait(Op& op, double timeout_s);
  // Runs `work` between two steps of the engine and returns when it has run.
  void call(const std::function<void()>& work);
  // The same without waiting for it.
  void run_soon(std::function<void()> work) { post(std::move(work), true); }
  // Lets go of what finished operations kept alive.
  void bury();
  // The last finished operations, oldest first (at most 4096).
  std::vector<Event> events();
  // When the last of them finished, however many there were; minus infinity before the first.
  double last_finished_s() const { return last_finished_s_; }
  // The times without an operation that ended, as one was submitted, later than this: in order, at
  // most the last 64.
  std::vector<Lull> lulls(double after_s);

  // Only inside `call` or a step:
  Poller& poller() { return poller_; }
  // Reached at `host`, an address of this host; of one for the whole process.
  Device& device(const std::string& host);
  // The one that there is; null before the first.
  Device* device() { return device_.get(); }
  uint64_t dropped_connections() const;
  void add_group(Group* group);
  void remove_group(Group* group);
  void complete(const OpPtr& op, std::exception_ptr error);
  // Priorities are in use: from now on, sockets buffer little that is not yet sent.
  void rank_by_priority();

 private:
  friend class Turns<Engine>;
  // What a turn is made of.
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
  std::vector<Group*> groups_;
  // Of a pass: what each group would do next.
  struct Head {
    int priority;
    double enqueued_s;
    Group* group;
  };
  std::vector<Head> heads_;
  bool ranked_ = false;
  // Until when less urgent operations send nothing; kNever: none is held back.
  double held_until_s_ = kNever;
  std::vector<Group*> checked_;  // of a look at deadlines
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
