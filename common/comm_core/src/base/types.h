// Element types and reductions, as every layer of the core names them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace comm_core {

enum class DType : uint8_t { f32, f64, f16, bf16, i8, i16, i32, i64, u8, b8, c64, c128 };

// `avg` is the sum divided by the number of ranks; the integer types do not have it.
enum class ReduceOp : uint8_t { sum, avg, min, max, product, band, bor, bxor };

// Bytes of one element.
size_t size_of(DType dtype);

// "float32", "bfloat16", ...: the names that torch uses.
const char* name(DType dtype);

// "sum", "avg", ...
const char* name(ReduceOp op);

// Memory of a caller. Whoever hands it over keeps it alive until the operation has ended.
struct Span {
  char* data = nullptr;
  size_t bytes = 0;
};

struct ConstSpan {
  const char* data = nullptr;
  size_t bytes = 0;

  ConstSpan() = default;
  ConstSpan(const char* d, size_t b) : data(d), bytes(b) {}
  ConstSpan(const Span& span) : data(span.data), bytes(span.bytes) {}  // NOLINT: a widening
};

// Bytes of all blocks.
template <typename Blocks>
uint64_t total(const Blocks& blocks) {
  uint64_t bytes = 0;
  for (const auto& block : blocks) bytes += block.bytes;
  return bytes;
}

}  // namespace comm_core
