// The ranks of one process group, as one of them sees it: connections, shared memory, and the queue
// of collectives, which run in the order in which they were submitted.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/scratch.h"
#include "base/store.h"
#include "collectives/frame.h"
#include "engine/engine.h"
#include "group/topology.h"
#include "shm/streams.h"
#include "transport/device.h"

namespace comm_core {

class Control;
class Messenger;
class Windows;

class Group : public std::enable_shared_from_this<Group> {
 public:
  // Meets the other ranks through `store`; every rank calls it, and it returns when all are
  // connected. `towards`: a host of the rendezvous, by which the interface is chosen if the options
  // name none. The group closes when the last copy of the pointer goes, which must not be in a
  // callback of an operation. Throws CommError.
  static std::shared_ptr<Group> create(std::shared_ptr<Engine> engine, Store& store, int rank,
                                       int size, const std::string& name,
                                       const std::string& towards, double timeout_s);
  ~Group();

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  double timeout_s() const { return timeout_s_; }
  uint64_t sequence() const { return next_sequence_ - 1; }
  // The first failure, or null; from any thread.
  std::exception_ptr error();
  void set_timeout_s(double timeout_s) { timeout_s_ = timeout_s; }

  // Queues an operation. Throws InvalidRequestError if it makes no sense; a group that has failed
  // returns an operation that has failed.
  OpPtr submit(OpSpec spec);
  // The input of an operation submitted as `held` is there now.
  void release(const OpPtr& op);
  // Fails everything that is under way here, and soon on all ranks.
  void abort(const std::string& reason);
  // Leaves the group. Idempotent; later submissions throw.
  void close();

  // Runs `work` on this rank's windows between two steps of the engine.
  void with_windows(const std::function<void(Windows&)>& work);

  // "4 ranks on 2 hosts, shm + tcp over 10.0.0.1 (eth0)": for logs.
  std::string summary() const;
  std::string describe(const Op& op) const;
  uint64_t total_bytes(const OpSpec& spec) const;
  uint64_t dropped_connections();

  // For the engine:
  uint64_t number() const { return number_; }
  void enqueue(const OpPtr& op);
  // The operation whose turn it is, or null.
  const Op* head() const {
    return queue_.empty() || queue_.front()->held_ || suspicion_ ? nullptr : queue_.front().get();
  }
  // One step; false if it can go no further now. `held`: it must not send.
  bool step(bool held);
  // When the last step made progress, and whether a peer has started the same operation.
  double moved_s() const { return moved_s_; }
  bool met() const { return met_; }
  // Limits what sockets buffer unsent, so that urgent data does not wait behind it.
  void limit_unsent();
  void announce_sleep(bool asleep);
  bool spins() const;
  // Ends what took too long; returns the next deadline.
  double next_deadline_s(double now_s);

  // For stages and their planner, in the engine:
  Engine& engine() { return *engine_; }
  const Options& options() const { return engine_->options(); }
  const PeerInfo& peer(int rank) const { return peers_[size_t(rank)]; }
  const Topology& topology() const { return topology_; }
  ShmStreams* shm() { return shm_.get(); }
  ScratchPool& scratch() { return scratch_; }
  // To `peer`; it may not be ready yet.
  Lane& out(int peer);
  // Called when a peer's first bytes of this operation arrive.
  void meet_peer() { met_ = true; }
  // Writes and returns the bytes taken: none while the operation is held.
  size_t write(Lane& lane, const iovec* parts, int num_parts);
  // From `peer`, null until it has connected.
  Lane* in(int peer);
  std::unique_ptr<Lane> connect(int peer, LaneKind kind, const Watching& watching) const;
  // `peer` has left in peace; the last collective that it took part in was number `finished`.
  void peer_left(int peer, uint64_t finished);
  // On rank 0: `peer` has been waiting in this collective; fails the group if here it is another.
  void compare(int peer, const FrameHeader& theirs);
  // Ends the group with what went wrong; tells the others unless they told us.
  void fail(std::exception_ptr error, bool tell);

 private:
  Group(std::shared_ptr<Engine> engine, int rank, int size, std::string name, double timeout_s);
  void meet(Store& all, const std::string& towards);
  std::unique_ptr<ShmStreams> share_memory(Store& store, const std::vector<PeerInfo>& peers,
                                           const Topology& topology);
  void enter(const LaneName& name, std::unique_ptr<Arrival> arrival);
  void leave();
  void expect_everybody(const Op& op) const;
  void begin(Op& op) const;
  bool advance(const OpPtr& op);
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
  bool held_ = false;  // in this step
  bool met_ = false;
  double moved_s_ = 0;
  bool limits_unsent_ = false;
  std::unique_ptr<Control> control_;
  // Of those who connected before this rank knew everybody.
  std::vector<std::pair<LaneName, std::unique_ptr<Arrival>>> early_;
  std::unique_ptr<Messenger> messenger_;
  std::vector<FrameHeader> shown_;  // by rank, the last that `compare` was called with
  ScratchPool scratch_;
  std::vector<uint64_t> finished_by_;  // by rank; the largest number while it is here
  std::deque<OpPtr> queue_;
  std::vector<OpPtr> held_messages_;
  std::atomic<uint64_t> next_sequence_{1};
  std::mutex submit_mutex_;
  std::exception_ptr error_;
  // A peer is gone; its reason, which is the better error, may still be on its way.
  std::exception_ptr suspicion_;
  double suspicion_until_s_ = 0;
  std::atomic<bool> closed_{false};
};

}  // namespace comm_core
