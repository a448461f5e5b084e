// Point-to-point messages, matched by sender and tag. Small ones go at once and wait at the
// receiver; large ones are announced and sent when the receiver has asked for them, straight into
// his memory. One-sided operations use the same connections, in order among themselves; but a
// message may arrive before a put that was started ahead of it, unless that was waited for.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "messages/message_link.h"
#include "messages/windows.h"

namespace comm_core {

class Messenger {
 public:
  explicit Messenger(Group& group);
  ~Messenger();

  void enter(int peer, Arrival& arrival);
  // Starts a send, a receive or a one-sided operation.
  void start(const OpPtr& op);
  // Ends every pending operation.
  void fail(const std::exception_ptr& error);
  // Ends operations that took too long; returns the next deadline.
  double next_deadline_s(double now_s);
  Windows& windows() { return windows_; }

  // The peer said goodbye.
  void left(int peer);

  // For the connections. A header has come: tells the receiver where the payload goes.
  void arrived(int peer, const MessageHeader& header, MessageReceiver& receiver);
  // A payload that was held has come completely.
  void held(int peer, const MessageHeader& header, std::string payload);
  void lost(int peer, const std::exception_ptr& error);
  // The operation's payload has been sent or has arrived, a window has answered, or it failed.
  void finished(const OpPtr& op, std::exception_ptr error = nullptr);
  MessageSender* sender(int peer);  // null if the peer cannot be reached any more

 private:
  struct Arrived {  // before anybody asked for it
    int peer;
    MessageHeader header;
    std::string payload;
  };

  void send(const OpPtr& op);
  void receive(const OpPtr& op);
  void matched(const OpPtr& op, int peer, const MessageHeader& announcement);
  std::exception_ptr gone(int peer) const;
  OpPtr take_posted(int peer, uint64_t tag);
  bool fits(const OpPtr& op, int peer, const MessageHeader& header);
  [[noreturn]] void malformed(int peer) const;

  Group& group_;
  Windows windows_;
  std::vector<std::unique_ptr<MessageSender>> senders_;
  std::vector<std::unique_ptr<MessageReceiver>> receivers_;
  std::vector<std::exception_ptr> gone_;  // why nothing more comes from a peer
  std::list<OpPtr> posted_;               // receives that wait for a message
  std::list<Arrived> arrived_;
  std::map<uint64_t, OpPtr> announced_;                 // own large sends, by id
  std::map<std::pair<int, uint64_t>, OpPtr> expected_;  // large receives asked for
  std::list<OpPtr> live_;
  uint64_t next_id_ = 1;
  size_t held_bytes_ = 0;
};

}  // namespace comm_core
