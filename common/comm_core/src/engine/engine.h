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
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/op.h"
#include "engine/options.h"
#include "engine/poller.h"
#include "tcp/listener.h"

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
  // The last one that an operation has ended by being submitted.
  Lull last_lull();

  // Only inside `call` or a step:
  Poller& poller() { return poller_; }
  Listener& listener(const std::string& host);
  void stop_listening(const Bytes16& group);
  uint64_t dropped_connections() const;
  void add_group(Group* group);
  void remove_group(Group* group);
  void complete(const OpPtr& op, std::exception_ptr error);

 private:
  void run();
  void drive(const Op* until, double deadline_s);
  bool pass();
  bool spin();
  bool give_way(const Op& until);
  void take_incoming();
  bool has_work();
  double check_deadlines();
  void post(std::function<void()> work, bool wake);

  const Options options_;
  const bool spin_allowed_;
  Poller poller_;
  std::unique_ptr<Listener> listener_;
  std::vector<Group*> groups_;

  std::mutex driving_;                // held by the driver
  std::atomic<bool> blocked_{false};  // the driver is, or is about to be, in the kernel
  std::mutex incoming_mutex_;
  std::vector<std::function<void()>> incoming_;
  std::atomic<bool> has_incoming_{false};

  std::mutex finished_mutex_;
  size_t under_way_ = 0;
  Lull lull_;
  std::vector<std::shared_ptr<void>> graveyard_;
  std::vector<Event> events_;
  size_t next_event_ = 0;
  std::atomic<double> last_finished_s_{-std::numeric_limits<double>::infinity()};

  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace comm_core
