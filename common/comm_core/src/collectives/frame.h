// What a rank says before its bytes in each stage of a collective, by which the other sees that
// both do the same.
#pragma once

#include <cstdint>
#include <string>

#include "engine/op.h"

namespace comm_core {

class Lane;

constexpr uint32_t kFrameMagic = 0x434d4652;

// How an operation is done. All ranks come to the same, from its size and equal settings.
enum class Way : uint32_t { undecided, flat, staged, in_place, few_hops, ring, two_levels };

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
  uint64_t total_bytes = 0;    // of the whole operation, as the sender sees it
  uint64_t payload_bytes = 0;  // what follows
};
static_assert(sizeof(FrameHeader) == 40);

// "all_reduce #12 (float32, sum, 400 bytes)".
std::string describe(const FrameHeader& header);

// Throws MismatchError, naming both sides, if `theirs` is not what `mine` expects.
void check_header(const FrameHeader& mine, const FrameHeader& theirs, const std::string& peer);

// Reads one from a lane, in as many calls as it takes.
class FrameReader {
 public:
  // True once it is there, so that its payload is next. Throws MismatchError unless it is `mine`
  // with a payload of `bytes`.
  bool expect(Lane& lane, FrameHeader mine, uint64_t bytes);

 private:
  FrameHeader header_;
  size_t have_ = 0;
};

}  // namespace comm_core
