// One-sided operations: memory of a rank that the others write, read and add to. The engine of the
// target serves them; its program takes no part. Each operation is applied as a whole.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "messages/message_link.h"

namespace comm_core {

class Group;
class Messenger;

class Windows {
 public:
  Windows(Group& group, Messenger& messenger) : group_(group), messenger_(messenger) {}

  // `memory` is `slots` pieces of equal size, kept alive by the caller until `remove`.
  void add(uint32_t number, Span memory, size_t slots, DType dtype);
  // Who waits for its lock is refused it.
  void remove(uint32_t number);
  // How often each slot was put or added to since `read` last reset it.
  std::vector<uint64_t> versions(uint32_t number) { return at(number).versions; }
  // Copies slots [first, first + count) out as they are at one moment; may reset their versions,
  // and set them to zero.
  void read(uint32_t number, size_t first, size_t count, char* to, bool reset, bool clear);

  // An operation of this rank on another's window, or on its own.
  void start(const OpPtr& op);
  // A request or a reply of a peer.
  void arrived(int peer, const MessageHeader& header, MessageReceiver& receiver);
  void held(int peer, const MessageHeader& header, const std::string& payload);
  // A peer is gone: its locks are free.
  void lost(int peer);
  void forget() { waiting_.clear(); }

 private:
  struct Window {
    Span memory;
    size_t slot_bytes;
    size_t slots;
    DType dtype;
    std::vector<uint64_t> versions;
    int holder = -1;  // of the lock
    std::deque<std::pair<int, uint64_t>> waiters;
  };
  Window& at(uint32_t number);
  // The refusal, or an empty text.
  std::string problem(const MessageHeader& header) const;
  // Does what a request asks; returns what a get yields.
  std::string apply(const MessageHeader& header, const char* payload);
  void serve(int peer, const MessageHeader& header, const char* payload);
  void answer(int peer, uint64_t id, const std::string& payload, bool refused);
  void grant_next(Window& window);

  Group& group_;
  Messenger& messenger_;
  std::map<uint32_t, Window> windows_;
  std::map<uint64_t, OpPtr> waiting_;  // own operations that await a reply
  uint64_t next_id_ = 1;
};

}  // namespace comm_core
