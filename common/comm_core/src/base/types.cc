#include "base/types.h"

#include <iterator>

namespace comm_core {

size_t size_of(DType dtype) {
  constexpr size_t kSizes[] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 1, 8, 16, 2, 4, 8, 4, 1, 1, 1, 1, 1};
  static_assert(std::size(kSizes) == size_t(DType::f8_e8m0fnu) + 1);
  return size_t(dtype) < std::size(kSizes) ? kSizes[size_t(dtype)] : 0;
}

const char* name(DType dtype) {
  constexpr const char* kNames[] = {
      "float32",       "float64",       "float16",     "bfloat16",        "int8",
      "int16",         "int32",         "int64",       "uint8",           "bool",
      "complex64",     "complex128",    "uint16",      "uint32",          "uint64",
      "complex32",     "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
      "float8_e8m0fnu"};
  static_assert(std::size(kNames) == size_t(DType::f8_e8m0fnu) + 1);
  return size_t(dtype) < std::size(kNames) ? kNames[size_t(dtype)] : "unknown";
}

const char* name(ReduceOp op) {
  constexpr const char* kNames[] = {"sum", "avg", "min", "max", "product", "band", "bor", "bxor"};
  return size_t(op) < std::size(kNames) ? kNames[size_t(op)] : "unknown";
}

}  // namespace comm_core
