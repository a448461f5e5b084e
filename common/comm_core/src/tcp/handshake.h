// Handshake in which both ends of a connection prove that they know the group's secret.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "secret/random.h"
#include "secret/sha256.h"
#include "transport/device.h"

namespace comm_core {

// Checks that both ends have the same byte order and protocol: Hello is sent as it is in memory.
constexpr uint64_t kHelloMagic = 0x434d43524f4c4832;  // "CMCROLH2"

// First message, from the connector to the acceptor. The acceptor answers with a challenge of 16
// random bytes, the connector with HMAC(secret, "c" + hello + challenge), and the acceptor with
// HMAC(secret, "s" + hello + challenge).
struct Hello {
  uint64_t magic = kHelloMagic;
  int32_t from = 0;  // ranks in the group
  int32_t to = 0;
  LaneKind kind = LaneKind::data;
  uint8_t pad[7] = {};
  Bytes16 group{};
  Bytes16 nonce{};
};
static_assert(sizeof(Hello) == 56);

// Returns the HMAC of `side`: 'c' for the connector, 's' for the acceptor.
Digest proof(const std::string& secret, char side, const Hello& hello, const Bytes16& challenge);

// The acceptor's side, which reads what strangers send.
class Acceptance {
 public:
  // Returns the door of a group, or null if this process has no such group.
  using Doors = std::function<const Door*(const Bytes16& group)>;

  // Continues over `lane`. Returns true when the peer has authenticated and the answer is sent.
  // Throws CommError if it is no rank of the group, or does not know the secret.
  bool advance(Lane& lane, const Doors& doors);
  const Hello& hello() const { return hello_; }

 private:
  bool greeted_ = false;
  size_t have_ = 0;
  Hello hello_;
  Bytes16 challenge_{};
  Digest proof_{};
};

}  // namespace comm_core
