// Framed messages between two ranks: one connection per direction, each with a queue of messages.
//
// A large payload is sent in pieces, each after a header. Small messages that may overtake are sent
// between two pieces. So the request that starts a large message of the other direction waits for
// one piece only, and not for all large messages in this direction.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/op.h"
#include "transport/device.h"

namespace comm_core {

// The group whose ranks exchange the messages.
struct MessageGroup {
  int rank = 0;                     // this rank
  std::vector<std::string> labels;  // by rank
  size_t eager_bytes = 0;  // messages up to this are sent before the receiver asks for them
  Poller& poller;
  // Begins to connect a lane to `peer`.
  std::function<std::unique_ptr<Lane>(int peer, const Watching& watching)> connect;
  // Ends an operation, with an error or null.
  std::function<void(const OpPtr& op, const std::exception_ptr& error)> complete;
  // Fails the group on all ranks.
  std::function<void(const std::exception_ptr& error)> fail;
  // Tells all ranks why this process may end.
  std::function<void(const std::string& reason)> warn;
  // Returns the loss of a peer with what was heard of its reason.
  std::function<std::exception_ptr(const std::exception_ptr& error)> explained;

  int size() const { return int(labels.size()); }
};

enum class MessageKind : uint8_t {
  eager,     // a small message with its payload
  announce,  // a large message is waiting at its sender
  request,   // the receiver asks for an announced message
  data,      // the requested message
  put,       // put to unlock: one-sided operations on a window
  accumulate,
  get,
  lock,
  unlock,
  reply,  // to one of these five: it is done; has the payload of a get
  more,   // the next piece of a large message
};

struct MessageHeader {
  uint32_t magic = 0;
  MessageKind kind = MessageKind::eager;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  uint8_t refused = 0;  // reply: the request was invalid; the payload is the reason
  uint64_t tag = 0;
  uint64_t id = 0;      // of a large message or a one-sided operation, chosen by its sender
  uint64_t bytes = 0;   // of the payload; `announce` and `get` are sent without it
  uint64_t offset = 0;  // bytes within the window's slot
  uint32_t window = 0;
  uint32_t slot = 0;
};
static_assert(sizeof(MessageHeader) == 48);

class Messenger;

// Sends the messages for one peer and owns the connection to it. Messages that may overtake keep
// their order among each other, and so do the others. Belongs to the thread that drives the engine.
class MessageSender : public Watcher {
 public:
  MessageSender(const MessageGroup& group, Messenger& messenger, int peer);

  // Queues a message without a payload, or with `payload`.
  void add(const MessageHeader& header, std::string payload = "") {
    enqueue({header, nullptr, std::move(payload)});
  }
  // Queues a message whose payload is the first input of `op`. If `ends`, the operation finishes
  // when that is sent, otherwise with a reply.
  void add(const MessageHeader& header, OpPtr op, bool ends) {
    enqueue({header, std::move(op), "", ends});
  }
  // Drops all messages. The memory of operations is not accessed after this call.
  void break_off();
  void on_event() override;

 private:
  struct Item {
    MessageHeader header;
    OpPtr op;
    std::string payload;
    bool ends = false;  // finish the operation when sent
    size_t done = 0;    // bytes of the payload that are sent
  };
  bool advance();
  void enqueue(Item item);
  std::deque<Item>& begin_frame();

  Messenger& messenger_;
  int peer_;
  std::unique_ptr<Lane> lane_;
  bool broken_ = false;
  std::deque<Item> small_, queue_;
  std::deque<Item>* sending_ = nullptr;  // the queue whose first item is being sent, or null
  MessageHeader frame_;
  size_t frame_done_ = 0;  // bytes of the header
  size_t piece_left_ = 0;
};

// Receives the messages of one peer and owns the connection from it. Belongs to the thread that
// drives the engine.
class MessageReceiver : public Watcher {
 public:
  MessageReceiver(const MessageGroup& group, Messenger& messenger, int peer, Arrival& arrival);

  // Called within Messenger::arrived: `into` reads the payload into the first output of `op`,
  // `hold` into a buffer that Messenger::held gets.
  void into(OpPtr op) { reading_->op = std::move(op); }
  void hold() { reading_->holding = true; }
  // Drops all messages. The memory of operations is not accessed after this call.
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

  Messenger& messenger_;
  int peer_;
  std::unique_ptr<Lane> lane_;
  bool broken_ = false;
  MessageHeader frame_;
  size_t frame_done_ = 0;  // bytes of the header
  size_t piece_left_ = 0;
  Incoming small_, large_;       // a small message may arrive between two pieces of a large one
  Incoming* reading_ = nullptr;  // the message of the current frame, or null
};

}  // namespace comm_core
