// What goes over a connection: the handshake, and the header in front of every payload.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "base/sha256.h"
#include "engine/op.h"

namespace comm_core {

// Ranks of one job run the same build on machines of one byte order; the magic number checks it.
constexpr uint64_t kHelloMagic = 0x434d43524f4c4832;  // "CMCROLH2"
constexpr uint32_t kFrameMagic = 0x434d4652;

using Bytes16 = std::array<uint8_t, 16>;

enum class LinkKind : uint8_t { control, data, messages };
constexpr int kNumLinkKinds = 3;

// Connector -> acceptor; the acceptor answers with a Challenge, the connector with
// HMAC(secret, "c" + hello + challenge), the acceptor with HMAC(secret, "s" + hello + challenge).
struct Hello {
  uint64_t magic = kHelloMagic;
  int32_t from = 0;  // ranks in the group
  int32_t to = 0;
  LinkKind kind = LinkKind::data;
  uint8_t pad[7] = {};
  Bytes16 group{};
  Bytes16 nonce{};
};
static_assert(sizeof(Hello) == 56);

inline Digest proof(const std::string& secret, char side, const Hello& hello,
                    const Bytes16& challenge) {
  std::string text(1, side);
  text.append(reinterpret_cast<const char*>(&hello), sizeof hello);
  text.append(reinterpret_cast<const char*>(challenge.data()), challenge.size());
  return hmac_sha256(secret, text);
}

// In front of what one rank sends another within one stage of a collective.
struct FrameHeader {
  uint32_t magic = kFrameMagic;
  OpKind kind = OpKind::barrier;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  uint8_t stage = 0;
  int32_t root = 0;
  uint32_t reserved = 0;
  uint64_t sequence = 0;
  uint64_t total_bytes = 0;    // of the whole operation, as the sender sees it
  uint64_t payload_bytes = 0;  // what follows
};
static_assert(sizeof(FrameHeader) == 40);

// "all_reduce #12 (float32, sum, 400 bytes)".
std::string describe(const FrameHeader& header);

// Throws MismatchError, naming both sides, if `theirs` is not what `mine` expects.
void check_header(const FrameHeader& mine, const FrameHeader& theirs, const std::string& peer);

// The next bytes of the kernel's random number generator.
void random_bytes(void* data, size_t bytes);

}  // namespace comm_core
