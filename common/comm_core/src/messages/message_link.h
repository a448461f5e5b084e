// Framed messages between two ranks: one connection each way, several messages queued on it.
//
// A large payload goes in pieces, each with a header in front. Between two pieces, what is small
// and may overtake does: the request that starts the large message of the other direction waits for
// a piece, not for all that is under way in this one.
#pragma once

#include <deque>
#include <memory>
#include <string>

#include "engine/op.h"
#include "transport/device.h"

namespace comm_core {

class Group;

enum class MessageKind : uint8_t {
  eager,     // a small message with its payload
  announce,  // a large message waits at its sender
  request,   // ... its receiver asks for it
  data,      // ... and here it is
  put,       // one-sided: payload for a window
  accumulate,
  get,
  lock,
  unlock,
  reply,  // to one of the five: done, with the payload of a get
  more,   // the next piece of the message that was interrupted
};

struct MessageHeader {
  uint32_t magic = 0;
  MessageKind kind = MessageKind::eager;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  uint8_t refused = 0;  // reply: the request made no sense at its target; the payload says why
  uint64_t tag = 0;
  uint64_t id = 0;      // of a large message or a request, given by whoever sends it
  uint64_t bytes = 0;   // of the payload that follows, or for `announce` and `get` would
  uint64_t offset = 0;  // bytes within the window's slot
  uint32_t window = 0;
  uint32_t slot = 0;
};
static_assert(sizeof(MessageHeader) == 48);

class Messenger;

// Writes the messages for one peer. Those that may overtake keep their order among themselves, as
// do the others.
class MessageSender : public Watcher {
 public:
  MessageSender(Group& group, Messenger& messenger, int peer);

  // A message without a payload, or with the text.
  void add(const MessageHeader& header, std::string payload = "") {
    enqueue({header, nullptr, std::move(payload)});
  }
  // The payload is the operation's first input. It `ends` when that is sent, or with a reply.
  void add(const MessageHeader& header, OpPtr op, bool ends) {
    enqueue({header, std::move(op), "", ends});
  }
  // Touches no operation's memory any more.
  void break_off();
  void on_event() override;

 private:
  struct Item {
    MessageHeader header;
    OpPtr op;
    std::string payload;
    bool ends = false;  // the operation, when sent
    size_t done = 0;    // bytes of the payload
  };
  bool advance();
  void enqueue(Item item);
  std::deque<Item>& begin_frame();

  Group& group_;
  Messenger& messenger_;
  int peer_;
  std::unique_ptr<Lane> lane_;
  bool broken_ = false;
  std::deque<Item> small_, queue_;
  std::deque<Item>* sending_ = nullptr;  // the one whose first item has a frame under way
  MessageHeader frame_;
  size_t frame_done_ = 0;  // bytes of the header
  size_t piece_left_ = 0;
};

// Reads the messages of one peer.
class MessageReceiver : public Watcher {
 public:
  MessageReceiver(Group& group, Messenger& messenger, int peer, Arrival& arrival);

  // Where the payload of the message that has just arrived goes: into an operation's output, or
  // aside.
  void into(OpPtr op) { reading_->op = std::move(op); }
  void hold() { reading_->holding = true; }
  void break_off();
  void on_event() override;

 private:
  struct Incoming {
    MessageHeader header;
    OpPtr op;
    bool holding = false;
    std::string held;
    size_t done = 0, bytes = 0;  // of the payload
  };
  bool advance();
  bool begin_frame();
  [[noreturn]] void malformed() const;

  Group& group_;
  Messenger& messenger_;
  int peer_;
  std::unique_ptr<Lane> lane_;
  bool broken_ = false;
  MessageHeader frame_;
  size_t frame_done_ = 0;  // bytes of the header
  size_t piece_left_ = 0;
  Incoming small_, large_;       // a small one may arrive between two pieces of a large one
  Incoming* reading_ = nullptr;  // the one that the frame belongs to
};

}  // namespace comm_core
