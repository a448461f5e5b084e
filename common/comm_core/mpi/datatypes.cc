#include "datatypes.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <cmath>

#include "library.h"

namespace comm_core::mpi {
namespace {

using Reduction = c10d::ReduceOp::RedOpType;

struct Sum {
  static float apply(float a, float b) { return a + b; }
};
struct Product {
  static float apply(float a, float b) { return a * b; }
};
// A NaN must win on every rank, whichever operand it is; std::min would depend on the order.
struct Min {
  static float apply(float a, float b) { return std::isnan(a) || a < b ? a : b; }
};
struct Max {
  static float apply(float a, float b) { return std::isnan(a) || a > b ? a : b; }
};

template <typename T, typename F>
void reduce_short(void* in, void* inout, int* count, MPI_Datatype*) {
  const T* from = static_cast<const T*>(in);
  T* to = static_cast<T*>(inout);
  for (int i = 0; i < *count; ++i) {
    to[i] = static_cast<T>(F::apply(static_cast<float>(from[i]), static_cast<float>(to[i])));
  }
}

// A 2-byte float: MPI sees opaque bytes, reduced by functions of ours.
struct ShortFloat {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op sum = MPI_OP_NULL;
  MPI_Op product = MPI_OP_NULL;
  MPI_Op min = MPI_OP_NULL;
  MPI_Op max = MPI_OP_NULL;

  template <typename T>
  void create() {
    check(MPI_Type_contiguous(2, MPI_BYTE, &type), "MPI_Type_contiguous");
    check(MPI_Type_commit(&type), "MPI_Type_commit");
    check(MPI_Op_create(reduce_short<T, Sum>, 1, &sum), "MPI_Op_create");
    check(MPI_Op_create(reduce_short<T, Product>, 1, &product), "MPI_Op_create");
    check(MPI_Op_create(reduce_short<T, Min>, 1, &min), "MPI_Op_create");
    check(MPI_Op_create(reduce_short<T, Max>, 1, &max), "MPI_Op_create");
  }

  void free() {
    if (type == MPI_DATATYPE_NULL) return;
    for (MPI_Op* op : {&sum, &product, &min, &max}) MPI_Op_free(op);
    MPI_Type_free(&type);
  }

  MPI_Op op(Reduction reduction) const {
    switch (reduction) {
      case Reduction::SUM:
      case Reduction::AVG: return sum;
      case Reduction::PRODUCT: return product;
      case Reduction::MIN: return min;
      case Reduction::MAX: return max;
      default: return MPI_OP_NULL;
    }
  }
};

// Written before, and freed after, every use of the progress thread that owns them.
ShortFloat half_type;
ShortFloat bfloat16_type;

const char* name_of(Reduction op) {
  static const char* const names[] = {"SUM",  "AVG", "PRODUCT", "MIN",        "MAX",
                                      "BAND", "BOR", "BXOR",    "PREMUL_SUM", "UNUSED"};
  return op <= Reduction::UNUSED ? names[op] : "unknown";
}

MPI_Op builtin_op(Reduction op) {
  switch (op) {
    case Reduction::SUM:
    case Reduction::AVG: return MPI_SUM;
    case Reduction::PRODUCT: return MPI_PROD;
    case Reduction::MIN: return MPI_MIN;
    case Reduction::MAX: return MPI_MAX;
    case Reduction::BAND: return MPI_BAND;
    case Reduction::BOR: return MPI_BOR;
    case Reduction::BXOR: return MPI_BXOR;
    default: return MPI_OP_NULL;
  }
}

MPI_Op logical_op(Reduction op) {
  switch (op) {
    case Reduction::SUM:
    case Reduction::MAX:
    case Reduction::BOR: return MPI_LOR;
    case Reduction::PRODUCT:
    case Reduction::MIN:
    case Reduction::BAND: return MPI_LAND;
    case Reduction::BXOR: return MPI_LXOR;
    default: return MPI_OP_NULL;
  }
}

MPI_Op find_op(Reduction op, at::ScalarType type) {
  const bool bitwise = op == Reduction::BAND || op == Reduction::BOR || op == Reduction::BXOR;
  if (type == at::kHalf) return half_type.op(op);
  if (type == at::kBFloat16) return bfloat16_type.op(op);
  if (type == at::kBool) return logical_op(op);
  if (at::isIntegralType(type, /*includeBool=*/false)) {
    return op == Reduction::AVG ? MPI_OP_NULL : builtin_op(op);
  }
  if (bitwise) return MPI_OP_NULL;
  if (at::isComplexType(type) && (op == Reduction::MIN || op == Reduction::MAX)) {
    return MPI_OP_NULL;
  }
  return builtin_op(op);
}

template <typename T, typename Divisor>
void divide_all(void* data, int64_t count, Divisor divisor) {
  T* values = static_cast<T*>(data);
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<T>(values[i] / divisor);
}

}  // namespace

void create_types() {
  half_type.create<c10::Half>();
  bfloat16_type.create<c10::BFloat16>();
}

void free_types() {
  half_type.free();
  bfloat16_type.free();
}

MPI_Datatype mpi_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return MPI_FLOAT;
    case at::kDouble: return MPI_DOUBLE;
    case at::kHalf: return half_type.type;
    case at::kBFloat16: return bfloat16_type.type;
    case at::kChar: return MPI_INT8_T;
    case at::kShort: return MPI_INT16_T;
    case at::kInt: return MPI_INT32_T;
    case at::kLong: return MPI_INT64_T;
    case at::kByte: return MPI_UINT8_T;
    case at::kBool: return MPI_C_BOOL;
    case at::kComplexFloat: return MPI_C_FLOAT_COMPLEX;
    case at::kComplexDouble: return MPI_C_DOUBLE_COMPLEX;
    default:
      TORCH_CHECK_WITH(TypeError, false, "the MPI backend does not carry ", type,
                       "; it has float16/32/64, bfloat16, int8/16/32/64, uint8, bool and "
                       "complex64/128");
  }
}

MPI_Op mpi_op(const c10d::ReduceOp& op, at::ScalarType type) {
  const MPI_Op found = find_op(op.op_, type);
  TORCH_CHECK_WITH(TypeError, found != MPI_OP_NULL, "the MPI backend cannot reduce ", type, " by ",
                   name_of(op.op_));
  return found;
}

void divide(void* data, int64_t count, at::ScalarType type, int divisor) {
  switch (type) {
    case at::kFloat: return divide_all<float>(data, count, static_cast<float>(divisor));
    case at::kDouble: return divide_all<double>(data, count, static_cast<double>(divisor));
    case at::kHalf: return divide_all<c10::Half>(data, count, static_cast<float>(divisor));
    case at::kBFloat16: return divide_all<c10::BFloat16>(data, count, static_cast<float>(divisor));
    case at::kComplexFloat:
      return divide_all<c10::complex<float>>(data, count, static_cast<float>(divisor));
    case at::kComplexDouble:
      return divide_all<c10::complex<double>>(data, count, static_cast<double>(divisor));
    default: TORCH_INTERNAL_ASSERT(false, "no average of ", type);
  }
}

}  // namespace comm_core::mpi
