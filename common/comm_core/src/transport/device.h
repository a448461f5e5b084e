// What makes lanes: where a process is reached, who is let in, and how others are reached.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/random.h"
#include "transport/address.h"
#include "transport/lane.h"

namespace comm_core {

// What goes over a lane, by which a device may treat it.
enum class LaneKind : uint8_t { control, data, messages };
constexpr int kNumLaneKinds = 3;

struct LaneName {
  Bytes16 group{};
  int from = 0;  // ranks of the group
  int to = 0;
  LaneKind kind = LaneKind::data;
};

// Where a lane leads to.
struct LaneTarget {
  Address address;
  std::string peer;    // for messages
  std::string secret;  // which both sides know
  LaneName name;
};

// A lane from another rank that has shown that it knows the secret, before anybody uses it.
class Arrival {
 public:
  virtual ~Arrival() = default;
  // Throws SystemError.
  virtual std::unique_ptr<Lane> lane(std::string peer, const Watching& watching) = 0;
};

// Whom a group lets in.
struct Door {
  std::string secret;
  int size = 0;  // of the group
  int rank = 0;
  std::function<void(const LaneName&, std::unique_ptr<Arrival>)> enter;  // throws nothing
};

class Device {
 public:
  virtual ~Device() = default;

  // Where this process is reached.
  virtual const Address& address() const = 0;
  virtual void open(const Bytes16& group, Door door) = 0;
  virtual void close(const Bytes16& group) = 0;
  // Begins a lane to another rank. Throws PeerLostError, SystemError.
  virtual std::unique_ptr<Lane> connect(const LaneTarget& target, const Watching& watching) = 0;
  // Ends what strangers take too long for; returns when to call again.
  virtual double next_deadline_s(double now_s) = 0;
  // Strangers that were turned away.
  virtual uint64_t dropped() const = 0;
};

}  // namespace comm_core
