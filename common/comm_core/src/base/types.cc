#include "base/types.h"

namespace comm_core {

size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::i8:
    case DType::u8:
    case DType::b8: return 1;
    case DType::f16:
    case DType::bf16:
    case DType::i16: return 2;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f64:
    case DType::i64:
    case DType::c64: return 8;
    case DType::c128: return 16;
  }
  return 0;
}

const char* name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "float32";
    case DType::f64: return "float64";
    case DType::f16: return "float16";
    case DType::bf16: return "bfloat16";
    case DType::i8: return "int8";
    case DType::i16: return "int16";
    case DType::i32: return "int32";
    case DType::i64: return "int64";
    case DType::u8: return "uint8";
    case DType::b8: return "bool";
    case DType::c64: return "complex64";
    case DType::c128: return "complex128";
  }
  return "unknown";
}

const char* name(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return "sum";
    case ReduceOp::avg: return "avg";
    case ReduceOp::min: return "min";
    case ReduceOp::max: return "max";
    case ReduceOp::product: return "product";
    case ReduceOp::band: return "band";
    case ReduceOp::bor: return "bor";
    case ReduceOp::bxor: return "bxor";
  }
  return "unknown";
}

}  // namespace comm_core
