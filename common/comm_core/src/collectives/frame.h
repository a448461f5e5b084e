// Header that a rank sends before its payload in each stage of a collective. The receiver checks
// that both ranks run the same operation.
#pragma once

#include <cstdint>
#include <string>

#include "engine/op.h"

namespace comm_core {

class Lane;

constexpr uint32_t kFrameMagic = 0x434d4652;

// Algorithm of an operation. All ranks choose the same one, from the size and their equal settings.
enum class Way : uint32_t { undecided, flat, staged, in_place, few_hops, ring, two_levels };

// Returns the name of the enumerator.
const char* name(Way way);

struct FrameHeader {
  uint32_t magic = kFrameMagic;
  OpKind kind = OpKind::barrier;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  uint8_t stage = 0;
  int32_t root = 0;
  Way way = Way::undecided;
  uint64_t sequence = 0;
  uint64_t total_bytes = 0;    // of the whole operation, as called on the sender
  uint64_t payload_bytes = 0;  // of the payload after this header
  uint64_t blocks = 0;         // digest of the sizes of all blocks; 0 unless every rank knows them
};
static_assert(sizeof(FrameHeader) == 48);

// Returns a digest of the sizes. Ranks that agree about the total may disagree about the blocks.
template <typename Blocks>
uint64_t digest_of_sizes(const Blocks& blocks) {
  uint64_t digest = 0xcbf29ce484222325;  // FNV-1a, on words instead of bytes
  for (const auto& block : blocks) digest = (digest ^ block.bytes) * 0x100000001b3;
  return digest;
}

// Returns "all_reduce #12 (float32, sum, 400 bytes)".
std::string describe(const FrameHeader& header);

// Throws MismatchError, which describes both calls, if `theirs` differs from `mine`. `peer` is the
// label of the sender.
void check_header(const FrameHeader& mine, const FrameHeader& theirs, const std::string& peer);

// Reads one header from a lane, over several calls if needed.
class FrameReader {
 public:
  // Returns true once the header is read and the payload is next. Throws MismatchError if it
  // differs from `mine` with a payload of `bytes`.
  bool expect(Lane& lane, FrameHeader mine, uint64_t bytes);

 private:
  FrameHeader header_;
  size_t have_ = 0;
};

}  // namespace comm_core
