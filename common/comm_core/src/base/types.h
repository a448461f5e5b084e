// Element types, reductions and memory spans that all layers of the core use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace comm_core {

// The last six only move: no reduction is defined for them.
enum class DType : uint8_t {
  f32,
  f64,
  f16,
  bf16,
  i8,
  i16,
  i32,
  i64,
  u8,
  b8,
  c64,
  c128,
  u16,
  u32,
  u64,
  c32,
  f8_e4m3fn,
  f8_e5m2,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  f8_e8m0fnu
};

// `avg` is the sum divided by the number of ranks. Integer types and bool do not support it.
enum class ReduceOp : uint8_t { sum, avg, min, max, product, band, bor, bxor };

// Returns the bytes of one element, or 0 if `dtype` is out of range.
size_t size_of(DType dtype);

// Returns the name that torch uses: "float32", "bfloat16", ...
const char* name(DType dtype);

// Returns the name of the reduction: "sum", "avg", ...
const char* name(ReduceOp op);

// Memory that the caller owns and must keep alive until the operation has finished.
struct Span {
  char* data = nullptr;
  size_t bytes = 0;
};

// Span that the operation only reads.
struct ConstSpan {
  const char* data = nullptr;
  size_t bytes = 0;

  ConstSpan() = default;
  ConstSpan(const char* d, size_t b) : data(d), bytes(b) {}
  ConstSpan(const Span& span) : data(span.data), bytes(span.bytes) {}  // NOLINT: a widening
};

// Returns the sum of the bytes of all blocks.
template <typename Blocks>
uint64_t total(const Blocks& blocks) {
  uint64_t bytes = 0;
  for (const auto& block : blocks) bytes += block.bytes;
  return bytes;
}

}  // namespace comm_core
