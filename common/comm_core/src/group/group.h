// One rank's view of a process group: its connections to the other ranks, the shared memory of the
// host, and the queue of collectives, which run in the order of their submission.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/scratch.h"
#include "base/store.h"
#include "collectives/frame.h"
#include "collectives/view.h"
#include "engine/engine.h"
#include "group/callback_order.h"
#include "secret/random.h"
#include "shm/streams.h"
#include "transport/device.h"
#include "transport/topology.h"

namespace comm_core {

class Control;
class Messenger;
class Windows;

// Owned by the pointers that `create` returns and by its operations in flight. It keeps its engine
// alive.
class Group : public OpQueue, public std::enable_shared_from_this<Group> {
 public:
  // Connects this rank with the others through `store`. Every rank must call it, and it returns
  // when all are connected, or throws a CommError. If the options name no interface, the one of the
  // route to the host `towards` is used. `timeout_s` is the default timeout of operations, in
  // seconds. The group closes when the last copy of the pointer is destroyed, which must not happen
  // in a callback of an operation. `store` is not used after the return.
  static std::shared_ptr<Group> create(std::shared_ptr<Engine> engine, Store& store, int rank,
                                       int size, const std::string& name,
                                       const std::string& towards, double timeout_s);
  // Called instead of `create` by a rank that cannot join because of `error`: `create` throws
  // PeerLostError on the others.
  static void decline(Store& store, int rank, int size, const std::exception& error);
  ~Group() override;

  double timeout_s() const { return timeout_s_; }
  // Returns the sequence number of the last submitted collective; 0 before the first.
  uint64_t sequence() const { return next_sequence_ - 1; }
  // Returns the first failure, or null. Thread-safe.
  std::exception_ptr error();
  void set_timeout_s(double timeout_s) { timeout_s_ = timeout_s; }

  // Queues an operation. Thread-safe. Throws InvalidRequestError for an invalid request,
  // AbortedError after `close`. In a failed group the operation fails.
  OpPtr submit(OpSpec spec);
  // Called before and after the callbacks of the future of a group's collective, for the order of
  // the collectives that they and the program submit (see group/callback_order.h). Thread-safe.
  static void callbacks_to_come(const Op& op);
  static void callbacks_over(const Op& op);
  // Starts an operation that was submitted as `held`: its input is ready.
  void release(const OpPtr& op);
  // Fails all operations in flight, on this rank at once and on the others soon.
  void abort(const std::string& reason);
  // Leaves the group and fails its unfinished operations here. Idempotent; later submissions throw.
  void close();

  // Runs `work` on this rank's windows between two steps of the engine. Throws AbortedError after
  // `close`.
  void with_windows(const std::function<void(Windows&)>& work);

  // Returns a line for logs: "group x: 4 ranks on 2 hosts, shared memory inside, TCP between; ...".
  std::string summary() const;
  // Returns the number of connections to this process that did not authenticate.
  uint64_t dropped_connections();

  Engine& engine() { return *engine_; }
  // Returns what its collectives see of it.
  GroupView view();

  // For the engine (see OpQueue):
  void enqueue(const OpPtr& op) override;
  const Op* head() const override {
    return queue_.empty() || queue_.front()->state().held || suspicion_ ? nullptr
                                                                        : queue_.front().get();
  }
  bool step(bool held) override;
  double moved_s() const override { return moved_s_; }
  bool met() const override { return lanes_.met(); }
  void limit_unsent() override { lanes_.limit_unsent(); }
  void announce_sleep(bool asleep) override;
  bool spins() const override;
  void warn(const std::string& reason) override;
  double next_deadline_s(double now_s) override;

  // For its control connections:
  const PeerInfo& peer(int rank) const { return peers_[size_t(rank)]; }
  // Begins to connect a new lane to `peer`.
  std::unique_ptr<Lane> connect(int peer, LaneKind kind, const Watching& watching) const;
  // Handles the departure of `peer`, whose last collective had the number `finished`.
  void peer_left(int peer, uint64_t finished);
  // Handles the end of a peer without a farewell, of which all ranks hear.
  void peer_lost(std::exception_ptr error);
  // Handles a failure for which the process of `peer` may end.
  void peer_in_trouble(int peer, const std::string& reason);
  // Compares, on rank 0, the collective in which `peer` waits with the one of the same number here.
  // Fails the group if they differ.
  void compare(int peer, const FrameHeader& theirs);
  // Fails the group and all its operations with `error`. `tell`: reports it to the other ranks.
  void fail(std::exception_ptr error, bool tell);

 private:
  Group(std::shared_ptr<Engine> engine, int rank, int size, std::string name, double timeout_s);
  void meet(Store& all, const std::string& towards);
  void introduce(Store& store, const std::string& towards);
  void join(Store& store);
  void connect_all(Store& store);
  std::unique_ptr<ShmStreams> share_memory(Store& store, const std::vector<PeerInfo>& peers,
                                           const Topology& topology);
  void enter(const LaneName& name, std::unique_ptr<Arrival> arrival);
  void leave();
  std::unique_ptr<Messenger> messenger();
  std::exception_ptr explained(const std::exception_ptr& error);
  void expect_everybody(const Op& op) const;
  bool advance(const OpPtr& op);
  void start(const OpPtr& op, bool wake);
  void start_kept(const std::vector<OpPtr>& ops);
  void keep_none();
  void start_message(const OpPtr& op);
  void check(const OpSpec& spec) const;
  FrameHeader frame(const Op& op) const;

  std::shared_ptr<Engine> engine_;
  std::atomic<double> timeout_s_;
  std::vector<PeerInfo> peers_;
  Topology topology_;
  std::string secret_;
  Bytes16 id_{};
  std::unique_ptr<ShmStreams> shm_;
  std::unique_ptr<LocalRanks> local_;
  uint64_t bell_id_ = 0;
  Lanes lanes_;
  double moved_s_ = 0;
  std::unique_ptr<Control> control_;
  // Connections that arrived before this rank knew the addresses of all.
  std::vector<std::pair<LaneName, std::unique_ptr<Arrival>>> early_;
  std::unique_ptr<Messenger> messenger_;
  std::vector<FrameHeader> shown_;  // by rank: the last argument of `compare`
  ScratchPool scratch_;
  std::vector<uint64_t> finished_by_;  // by rank: its last collective; UINT64_MAX until it leaves
  std::deque<OpPtr> queue_;
  std::vector<OpPtr> held_messages_;
  std::atomic<uint64_t> next_sequence_{1};
  std::mutex submit_mutex_;
  uint64_t last_number_ = 0;  // this and `order_` under submit_mutex_
  CallbackOrder order_;
  std::atomic<double> kept_until_s_{kNever};
  std::exception_ptr error_;
  // The loss of a peer. Until `suspicion_until_s_` the group waits for the peer's report of the
  // reason, which is the better error.
  std::exception_ptr suspicion_;
  double suspicion_until_s_ = 0;
  std::string trouble_;      // the first failure for which a peer may end
  std::exception_ptr lost_;  // a peer has ended without a farewell, at lost_at_s_; null: none has
  double lost_at_s_ = 0;
  std::atomic<bool> closed_{false};
};

// During its lifetime this thread runs the callbacks of the future of `op`. Unless `ordered`, the
// collectives that they submit have no defined place among those of the program.
class InCallbacks {
 public:
  InCallbacks(const Op& op, bool ordered);
  ~InCallbacks();
  InCallbacks(const InCallbacks&) = delete;
  InCallbacks& operator=(const InCallbacks&) = delete;

 private:
  const OpQueue* group_;  // what the thread ran before
  uint64_t number_;
  int depth_;
};

}  // namespace comm_core
