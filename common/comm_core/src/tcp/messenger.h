// Point-to-point messages, matched by sender and tag. Small ones go at once and wait at the receiver;
// large ones are announced and sent when the receiver has asked for them, straight into his memory.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "op.h"
#include "tcp/link.h"

namespace comm_core {

class Group;

class Messenger {
 public:
  explicit Messenger(Group& group);
  ~Messenger();

  void accept(int peer, Fd fd);
  void send(const OpPtr& op);
  void receive(const OpPtr& op);
  // Ends every pending operation.
  void fail(const std::exception_ptr& error);
  // Ends operations that took too long; returns the next deadline, or < 0.
  double check_deadlines(double now_s);

 private:
  enum class Kind : uint8_t { eager, announce, request, data };
  struct Header {
    uint32_t magic;
    Kind kind;
    DType dtype;
    uint16_t reserved;
    uint64_t tag;
    uint64_t id;     // of a large message, given by its sender
    uint64_t bytes;
  };
  struct Arrived {  // before anybody asked for it
    int peer;
    Header header;
    std::string payload;
  };
  class Sender;
  class Receiver;
  friend class Sender;
  friend class Receiver;

  void post(int peer, Header header, OpPtr op);
  // A header has come: tells the receiver where the payload goes.
  void arrived(int peer, const Header& header, Receiver& receiver);
  // A small message that nobody waited for has come completely.
  void held(int peer, const Header& header, std::string payload);
  void matched(const OpPtr& op, int peer, const Header& header);
  OpPtr take_posted(int peer, uint64_t tag);
  void finished(const OpPtr& op, std::exception_ptr error = nullptr);
  void lost(int peer, const std::exception_ptr& error);
  bool fits(const OpPtr& op, int peer, const Header& header);

  Group& group_;
  std::vector<std::unique_ptr<Sender>> senders_;
  std::vector<std::unique_ptr<Receiver>> receivers_;
  std::list<OpPtr> posted_;                              // receives that wait for a message
  std::list<Arrived> arrived_;
  std::map<uint64_t, OpPtr> announced_;                  // own large sends, by id
  std::map<std::pair<int, uint64_t>, OpPtr> expected_;   // large receives asked for
  std::list<OpPtr> live_;
  uint64_t next_id_ = 1;
  size_t held_bytes_ = 0;
};

}  // namespace comm_core
