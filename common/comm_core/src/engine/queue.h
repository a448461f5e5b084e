// A queue of operations, as the engine sees it.
#pragma once

#include <string>

#include "engine/op.h"

namespace comm_core {

// One rank's part in a group of ranks, whose collectives run in the order of their submission. The
// functions that are virtual belong to the thread that drives the engine.
class OpQueue {
 public:
  OpQueue(std::string name, int rank, int size);
  virtual ~OpQueue() = default;
  OpQueue(const OpQueue&) = delete;
  OpQueue& operator=(const OpQueue&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  uint64_t number() const { return number_; }  // unique in this process

  virtual void enqueue(const OpPtr& op) = 0;
  // Returns the next collective, or null if there is none or it cannot run now.
  virtual const Op* head() const = 0;
  // Advances it by one step. Returns false if it makes no progress now. `held`: it must not send.
  virtual bool step(bool held) = 0;
  // Return when a step last made progress (seconds of now_s()), and whether a peer has started the
  // same operation.
  virtual double moved_s() const = 0;
  virtual bool met() const = 0;
  // Limits the unsent bytes in the sockets, so that urgent data does not wait for them.
  virtual void limit_unsent() = 0;
  // Tells the ranks of this host whether they must wake this process.
  virtual void announce_sleep(bool asleep) = 0;
  // Returns whether a thread that waits for this queue should spin before it sleeps.
  virtual bool spins() const = 0;
  // Tells the other ranks of a failure for which this process may end.
  virtual void warn(const std::string& reason) = 0;
  // Fails operations whose timeout has passed. Returns the next deadline, in seconds of now_s().
  virtual double next_deadline_s(double now_s) = 0;

 private:
  const std::string name_;
  const int rank_, size_;
  const uint64_t number_;
};

}  // namespace comm_core
