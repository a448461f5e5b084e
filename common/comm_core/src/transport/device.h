// A device makes lanes: it listens at the address of this process, authenticates the connections of
// other ranks and connects to them.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "secret/random.h"
#include "transport/address.h"
#include "transport/lane.h"

namespace comm_core {

// Traffic of a lane. A device may configure its connections differently per kind.
enum class LaneKind : uint8_t { control, data, messages };
constexpr int kNumLaneKinds = 3;

// Identity of a lane: the id of its group, its two ranks in the group, and its kind.
struct LaneName {
  Bytes16 group{};
  int from = 0;  // rank that connects
  int to = 0;    // rank that accepts
  LaneKind kind = LaneKind::data;
};

// Destination of a lane that this rank opens.
struct LaneTarget {
  Address address;
  std::string peer;    // label of the peer, for error messages
  std::string secret;  // of the group
  LaneName name;
};

// Authenticated connection from another rank that is not in use yet. It becomes a lane once.
class Arrival {
 public:
  virtual ~Arrival() = default;
  // Returns the lane and gives up the connection. `peer` is its label. Throws SystemError.
  virtual std::unique_ptr<Lane> lane(std::string peer, const Watching& watching) = 0;
};

// Admission of a group's incoming connections: its secret, its size, this rank, and a callback that
// takes over each authenticated connection.
struct Door {
  std::string secret;
  int size = 0;                                                          // ranks of the group
  int rank = 0;                                                          // this rank
  std::function<void(const LaneName&, std::unique_ptr<Arrival>)> enter;  // throws nothing
};

// Belongs to the thread that drives the engine.
class Device {
 public:
  virtual ~Device() = default;

  // Returns the address at which this process listens.
  virtual const Address& address() const = 0;
  // Accepts connections for `group` from now on, until `close`.
  virtual void open(const Bytes16& group, Door door) = 0;
  virtual void close(const Bytes16& group) = 0;
  // Begins to connect to another rank and returns the lane. Throws PeerLostError, SystemError.
  virtual std::unique_ptr<Lane> connect(const LaneTarget& target, const Watching& watching) = 0;
  // Drops connections whose handshake takes too long. Returns the time, on the clock of now_s(), at
  // which to call it again.
  virtual double next_deadline_s(double now_s) = 0;
  // Returns the number of connections that were dropped before they had authenticated.
  virtual uint64_t dropped() const = 0;
  // Returns since when, on the clock of now_s(), it can accept nobody, because descriptors or
  // memory have run out; kNever if it can.
  virtual double exhausted_since_s() const = 0;
};

}  // namespace comm_core
