// One-sided operations: the other ranks write, read and add to windows, which are memory of a rank.
// The engine of the target serves them, without calls of its program. Each operation is atomic.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "messages/message_link.h"

namespace comm_core {

class Messenger;

// The windows of one rank, and its operations on the windows of all ranks. Belongs to the thread
// that drives the engine.
class Windows {
 public:
  Windows(const MessageGroup& group, Messenger& messenger) : group_(group), messenger_(messenger) {}

  // Adds a window. `memory` consists of `slots` slots of equal size. The caller owns it and keeps
  // it alive until `remove`. `number` must be the same on all ranks.
  void add(uint32_t number, Span memory, size_t slots, DType dtype);
  // Removes a window. Ranks that wait for its lock get InvalidRequestError.
  void remove(uint32_t number);
  // Returns by slot how many puts and accumulates were applied since `read` last reset the count.
  // Throws InvalidRequestError if there is no such window.
  std::vector<uint64_t> versions(uint32_t number) { return at(number).versions; }
  // Copies slots [first, first + count) to `to` as one atomic operation. `reset` sets their
  // versions to 0, `clear` their memory. Throws InvalidRequestError if there is no such window or
  // slot.
  void read(uint32_t number, size_t first, size_t count, char* to, bool reset, bool clear);

  // Starts an operation of this rank on the window of another rank or its own.
  void start(const OpPtr& op);
  // Handle a request or a reply of a peer: its header, and its complete payload.
  void arrived(int peer, const MessageHeader& header, MessageReceiver& receiver);
  void held(int peer, const MessageHeader& header, const std::string& payload);
  // Handles the loss of a peer: releases its locks.
  void lost(int peer);
  // Drops this rank's operations, which the messenger fails.
  void forget() { waiting_.clear(); }

 private:
  struct Window {
    Span memory;
    size_t slot_bytes;
    size_t slots;
    DType dtype;
    std::vector<uint64_t> versions;
    int holder = -1;  // rank that holds the lock; -1: none
    std::deque<std::pair<int, uint64_t>> waiters;
  };
  Window& at(uint32_t number);
  // Returns why a request is invalid, or an empty text.
  std::string problem(const MessageHeader& header) const;
  // Applies a valid put, get or accumulate. Returns the data of a get.
  std::string apply(const MessageHeader& header, const char* payload);
  void serve(int peer, const MessageHeader& header, const char* payload);
  void answer(int peer, uint64_t id, const std::string& payload, bool refused);
  void grant_next(Window& window);

  const MessageGroup& group_;
  Messenger& messenger_;
  std::map<uint32_t, Window> windows_;
  std::map<uint64_t, OpPtr> waiting_;  // this rank's operations that wait for a reply, by id
  uint64_t next_id_ = 1;
};

}  // namespace comm_core
