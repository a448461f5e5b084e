// Handshake in which both ends of a connection prove that they know the group's secret.
#pragma once

#include <cstdint>
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
inline Digest proof(const std::string& secret, char side, const Hello& hello,
                    const Bytes16& challenge) {
  std::string text(1, side);
  text.append(reinterpret_cast<const char*>(&hello), sizeof hello);
  text.append(reinterpret_cast<const char*>(challenge.data()), challenge.size());
  return hmac_sha256(secret, text);
}

}  // namespace comm_core
