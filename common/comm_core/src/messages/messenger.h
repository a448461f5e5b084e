// Point-to-point messages, matched by sender and tag. Small messages (up to Options::tcp_eager
// bytes) are sent at once and buffered at the receiver. Large ones are announced, and sent into the
// memory of the receiver when it asks for them. One-sided operations use the same connections and
// keep their order. But a message may arrive before a put that was started earlier, unless the
// sender has waited for the put.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "messages/message_link.h"
#include "messages/windows.h"

namespace comm_core {

// Owns the message connections and windows of its group, which must outlive it. Belongs to the
// thread that drives the engine.
class Messenger {
 public:
  explicit Messenger(MessageGroup group);
  ~Messenger();

  // Takes over the message connection from `peer`.
  void enter(int peer, Arrival& arrival);
  // Starts a send, a receive or a one-sided operation, which `finished` ends.
  void start(const OpPtr& op);
  // Fails all operations that are not finished.
  void fail(const std::exception_ptr& error);
  // If an operation has timed out, fails it and the group. Returns the next deadline, in seconds of
  // now_s().
  double next_deadline_s(double now_s);
  Windows& windows() { return windows_; }

  // Handles the departure of a peer that has said goodbye.
  void left(int peer);

  // For the connections: Handles a header that has arrived, and tells the receiver where its
  // payload goes.
  void arrived(int peer, const MessageHeader& header, MessageReceiver& receiver);
  // Handles a payload that was buffered and is complete.
  void held(int peer, const MessageHeader& header, std::string payload);
  // Handles the loss of `peer`: fails all operations that need it.
  void lost(int peer, const std::exception_ptr& loss);
  // Completes an operation: its payload was sent or has arrived, a window has replied, or it
  // failed.
  void finished(const OpPtr& op, std::exception_ptr error = nullptr);
  MessageSender* sender(int peer);  // null if the peer cannot be reached any more

 private:
  struct Arrived {  // a message that no receive has asked for yet
    int peer;
    MessageHeader header;
    std::string payload;
  };

  void hurt(const OpPtr& op, const std::exception_ptr& loss);
  void send(const OpPtr& op);
  void receive(const OpPtr& op);
  void matched(const OpPtr& op, int peer, const MessageHeader& announcement);
  std::exception_ptr gone(int peer) const;
  OpPtr take_posted(int peer, uint64_t tag);
  bool fits(const OpPtr& op, int peer, const MessageHeader& header);
  [[noreturn]] void malformed(int peer) const;

  const MessageGroup group_;
  Windows windows_;
  std::vector<std::unique_ptr<MessageSender>> senders_;
  std::vector<std::unique_ptr<MessageReceiver>> receivers_;
  std::vector<std::exception_ptr> gone_;  // by rank: why it is lost, or null
  std::list<OpPtr> posted_;               // receives that wait for a message
  std::list<Arrived> arrived_;
  std::map<uint64_t, OpPtr> announced_;                 // large sends of this rank, by id
  std::map<std::pair<int, uint64_t>, OpPtr> expected_;  // large receives, by peer and id
  std::list<OpPtr> live_;                               // all that are not finished
  uint64_t next_id_ = 1;
  size_t held_bytes_ = 0;  // of buffered messages
};

}  // namespace comm_core
