#include "messages/windows.h"

#include <algorithm>
#include <cstring>

#include "messages/messenger.h"
#include "reduce/kernels.h"

namespace comm_core {

namespace {

MessageKind kind_of(OpKind kind) {
  switch (kind) {
    case OpKind::put: return MessageKind::put;
    case OpKind::get: return MessageKind::get;
    case OpKind::accumulate: return MessageKind::accumulate;
    case OpKind::lock: return MessageKind::lock;
    default: return MessageKind::unlock;
  }
}

}  // namespace

void Windows::add(uint32_t number, Span memory, size_t slots, DType dtype) {
  const size_t slot_bytes = memory.bytes / std::max<size_t>(1, slots);
  windows_[number] = {memory, slot_bytes, slots, dtype, std::vector<uint64_t>(slots), -1, {}};
}

void Windows::remove(uint32_t number) {
  const auto found = windows_.find(number);
  if (found == windows_.end()) return;
  const auto waiters = std::move(found->second.waiters);
  windows_.erase(found);
  for (const auto& [peer, id] : waiters) answer(peer, id, "the window was freed", true);
}

Windows::Window& Windows::at(uint32_t number) {
  const auto found = windows_.find(number);
  if (found == windows_.end()) throw InvalidRequestError("the window was freed");
  return found->second;
}

void Windows::read(uint32_t number, size_t first, size_t count, char* to, bool reset, bool clear) {
  Window& window = at(number);
  if (first > window.slots || count > window.slots - first)
    throw InvalidRequestError("the window has no such slot");
  char* from = window.memory.data + first * window.slot_bytes;
  memcpy(to, from, count * window.slot_bytes);
  if (clear) memset(from, 0, count * window.slot_bytes);
  if (reset) std::fill_n(window.versions.begin() + long(first), count, 0);
}

void Windows::start(const OpPtr& op) {
  const OpSpec& spec = op->spec();
  MessageHeader header;
  header.kind = kind_of(spec.kind);
  header.dtype = spec.dtype;
  header.op = spec.op;
  header.window = spec.window;
  header.slot = spec.slot;
  header.offset = spec.offset;
  header.id = next_id_++;
  header.bytes = !spec.inputs.empty()    ? spec.inputs[0].bytes
                 : !spec.outputs.empty() ? spec.outputs[0].bytes
                                         : 0;
  waiting_[header.id] = op;
  if (spec.peer == group_.rank) {
    serve(spec.peer, header, spec.inputs.empty() ? nullptr : spec.inputs[0].data);
    return;
  }
  if (MessageSender* sender = messenger_.sender(spec.peer)) sender->add(header, op, false);
}

std::string Windows::problem(const MessageHeader& header) const {
  const auto found = windows_.find(header.window);
  if (found == windows_.end()) return "it has no such window (freed?)";
  const Window& window = found->second;
  if (header.kind == MessageKind::lock || header.kind == MessageKind::unlock) return "";
  if (header.dtype != window.dtype) {
    return std::string("its window has dtype ") + name(window.dtype) + ", not " +
           name(header.dtype);
  }
  if (header.slot >= window.slots) {
    return "its window has " + std::to_string(window.slots) + " slots, without number " +
           std::to_string(header.slot);
  }
  if (header.offset > window.slot_bytes || header.bytes > window.slot_bytes - header.offset) {
    return "the slots of its window have " + std::to_string(window.slot_bytes) + " bytes, not " +
           std::to_string(header.bytes) + " at offset " + std::to_string(header.offset);
  }
  const size_t unit = size_of(header.dtype);
  if (header.offset % unit != 0 || header.bytes % unit != 0) {
    return "offset " + std::to_string(header.offset) + " or " + std::to_string(header.bytes) +
           " bytes are no whole number of " + name(header.dtype);
  }
  if (header.kind == MessageKind::accumulate &&
      (header.op == ReduceOp::avg || !supports(header.dtype, header.op))) {
    return std::string("unsupported reduction: ") + name(header.op) + " of " + name(header.dtype);
  }
  return "";
}

std::string Windows::apply(const MessageHeader& header, const char* payload) {
  Window& window = windows_.at(header.window);
  char* at = window.memory.data + header.slot * window.slot_bytes + header.offset;
  if (header.kind == MessageKind::get) return std::string(at, header.bytes);
  if (header.kind == MessageKind::put) {
    memcpy(at, payload, header.bytes);
  } else {
    const void* sources[2] = {at, payload};
    reduce(header.dtype, header.op, at, sources, 2, header.bytes / size_of(header.dtype));
  }
  ++window.versions[header.slot];
  return "";
}

void Windows::serve(int peer, const MessageHeader& header, const char* payload) {
  const std::string refusal = problem(header);
  if (!refusal.empty()) return answer(peer, header.id, refusal, true);
  Window& window = windows_.at(header.window);
  if (header.kind == MessageKind::lock) {
    window.waiters.emplace_back(peer, header.id);
    grant_next(window);
  } else if (header.kind == MessageKind::unlock) {
    if (window.holder != peer)
      return answer(peer, header.id, "the caller does not hold the lock", true);
    window.holder = -1;
    answer(peer, header.id, "", false);
    grant_next(window);
  } else {
    answer(peer, header.id, apply(header, payload), false);
  }
}

void Windows::grant_next(Window& window) {
  if (window.holder >= 0 || window.waiters.empty()) return;
  const auto [peer, id] = window.waiters.front();
  window.waiters.pop_front();
  window.holder = peer;
  answer(peer, id, "", false);
}

void Windows::answer(int peer, uint64_t id, const std::string& payload, bool refused) {
  MessageHeader header;
  header.kind = MessageKind::reply;
  header.id = id;
  header.refused = refused;
  header.bytes = payload.size();
  if (peer == group_.rank) return held(peer, header, payload);
  if (MessageSender* sender = messenger_.sender(peer)) sender->add(header, payload);
}

void Windows::arrived(int peer, const MessageHeader& header, MessageReceiver& receiver) {
  const bool pays = header.kind == MessageKind::put || header.kind == MessageKind::accumulate;
  if (header.kind == MessageKind::reply) {
    const auto found = waiting_.find(header.id);
    if (found == waiting_.end() || found->second->spec().peer != peer) {
      throw MismatchError("unexpected reply from " + group_.labels[size_t(peer)]);
    }
    const OpSpec& spec = found->second->spec();
    const size_t bytes = spec.outputs.empty() ? 0 : spec.outputs[0].bytes;
    if (header.refused ? header.bytes > 4096 : header.bytes != bytes) {
      throw MismatchError("malformed reply from " + group_.labels[size_t(peer)]);
    }
    receiver.hold();
  } else if (pays) {
    // A large payload is not buffered if no window can take it.
    if (!problem(header).empty() && header.bytes > (size_t(64) << 20)) {
      throw MismatchError("invalid request from " + group_.labels[size_t(peer)] + ": " +
                          problem(header));
    }
    receiver.hold();
  } else {
    serve(peer, header, nullptr);
  }
}

void Windows::held(int peer, const MessageHeader& header, const std::string& payload) {
  if (header.kind != MessageKind::reply) return serve(peer, header, payload.data());
  const auto found = waiting_.find(header.id);
  if (found == waiting_.end()) return;
  const OpPtr op = found->second;
  waiting_.erase(found);
  if (header.refused) {
    messenger_.finished(
        op, std::make_exception_ptr(InvalidRequestError(
                op->describe() + ": " + group_.labels[size_t(peer)] + " refused: " + payload)));
    return;
  }
  if (!op->spec().outputs.empty()) {
    std::copy(payload.begin(), payload.end(), op->spec().outputs[0].data);
  }
  messenger_.finished(op);
}

void Windows::lost(int peer) {
  std::erase_if(waiting_, [&](const auto& entry) { return entry.second->spec().peer == peer; });
  for (auto& [number, window] : windows_) {
    std::erase_if(window.waiters, [&](const auto& waiter) { return waiter.first == peer; });
    if (window.holder != peer) continue;
    window.holder = -1;
    grant_next(window);
  }
}

}  // namespace comm_core
