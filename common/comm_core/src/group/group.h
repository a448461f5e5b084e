// One rank's view of a process group: its connections to the other ranks, the shared memory of the
// host, and the queue of collectives, which run in the order of their submission.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/scratch.h"
#include "base/store.h"
#include "collectives/frame.h"
#include "engine/engine.h"
#include "group/callback_order.h"
#include "group/topology.h"
#include "secret/random.h"
#include "shm/streams.h"
#include "transport/device.h"

namespace comm_core {

class Control;
class Messenger;
class Windows;

// Owned by the pointers that `create` returns and by its operations in flight. It keeps its engine
// alive.
class Group : public std::enable_shared_from_this<Group> {
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
  ~Group();

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  double timeout_s() const { return timeout_s_; }
  // Returns the sequence number of the last submitted collective; 0 before the first.
  uint64_t sequence() const { return next_sequence_ - 1; }
  // Returns the first failure, or null. Thread-safe.
  std::exception_ptr error();
  void set_timeout_s(double timeout_s) { timeout_s_ = timeout_s; }

  // Queues an operation. Thread-safe. Throws InvalidRequestError for an invalid request,
  // AbortedError after `close`. In a failed group the operation fails.
  OpPtr submit(OpSpec spec);
  // Called before and after the callbacks of a collective's future, for the order of the
  // collectives that they and the program submit (see group/callback_order.h). Thread-safe.
  void callbacks_to_come(const Op& op);
  void callbacks_over(const Op& op);
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
  // Returns "all_reduce #12 (float32, sum, 400 bytes) on rank 0 of group x".
  std::string describe(const Op& op) const;
  // Returns the bytes of the whole operation: the blocks of all ranks.
  uint64_t total_bytes(const OpSpec& spec) const;
  // Returns the number of connections to this process that did not authenticate.
  uint64_t dropped_connections();

  // For the engine:
  uint64_t number() const { return number_; }  // unique in this process
  void enqueue(const OpPtr& op);
  // Returns the next collective, or null if there is none or it cannot run now.
  const Op* head() const {
    return queue_.empty() || queue_.front()->held_ || suspicion_ ? nullptr : queue_.front().get();
  }
  // Advances it by one step. Returns false if it makes no progress now. `held`: it must not send.
  bool step(bool held);
  // Return when a step last made progress (seconds of now_s()), and whether a peer has started the
  // same operation.
  double moved_s() const { return moved_s_; }
  bool met() const { return met_; }
  // Limits the unsent bytes in the sockets, so that urgent data does not wait for them.
  void limit_unsent();
  void announce_sleep(bool asleep);
  // Returns whether a thread that waits for this group should spin before it sleeps.
  bool spins() const;
  // Fails operations whose timeout has passed. Returns the next deadline, in seconds of now_s().
  double next_deadline_s(double now_s);

  // For stages and their planner, only within a step:
  Engine& engine() { return *engine_; }
  const Options& options() const { return engine_->options(); }
  const PeerInfo& peer(int rank) const { return peers_[size_t(rank)]; }
  const Topology& topology() const { return topology_; }
  ShmStreams* shm() { return shm_.get(); }  // null without shared memory
  ScratchPool& scratch() { return scratch_; }
  // Returns the lane to `peer`, opened on first use. It may not be ready yet.
  Lane& out(int peer);
  // Called when the first bytes of this operation arrive from a peer.
  void meet_peer() { met_ = true; }
  // Writes to `lane` and returns the bytes written: 0 while the operation must not send.
  size_t write(Lane& lane, const iovec* parts, int num_parts);
  // Returns the lane from `peer`, or null until it has connected.
  Lane* in(int peer);
  // Begins to connect a new lane to `peer`.
  std::unique_ptr<Lane> connect(int peer, LaneKind kind, const Watching& watching) const;
  // Handles the departure of `peer`, whose last collective had the number `finished`.
  void peer_left(int peer, uint64_t finished);
  // Handles the end of a peer without a farewell, of which all ranks hear.
  void peer_lost(std::exception_ptr error);
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
  void expect_everybody(const Op& op) const;
  void begin(Op& op) const;
  bool advance(const OpPtr& op);
  void start(const OpPtr& op);
  void start_kept(const std::vector<OpPtr>& ops);
  void keep_none();
  void start_message(const OpPtr& op);
  void check(const OpSpec& spec) const;
  FrameHeader frame(const Op& op) const;

  std::shared_ptr<Engine> engine_;
  const int rank_, size_;
  const std::string name_;
  const uint64_t number_;
  std::atomic<double> timeout_s_;
  std::vector<PeerInfo> peers_;
  Topology topology_;
  std::string secret_;
  Bytes16 id_{};
  std::unique_ptr<ShmStreams> shm_;
  uint64_t bell_id_ = 0;
  std::vector<std::unique_ptr<Lane>> in_, out_;
  bool held_ = false;  // this step must not send
  bool met_ = false;
  double moved_s_ = 0;
  bool limits_unsent_ = false;
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
  const Group* group_;  // what the thread ran before
  uint64_t number_;
  int depth_;
};

}  // namespace comm_core
