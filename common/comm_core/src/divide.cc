#include <string>

#include "errors.h"
#include "reduce_fold.h"
#include "reduce_kernels.h"

namespace comm_core {
namespace {

COMM_CORE_CLONES
void divide_f32(float* data, size_t count, float divisor) {
  for (size_t i = 0; i < count; ++i) data[i] /= divisor;
}

COMM_CORE_CLONES
void divide_f64(double* data, size_t count, double divisor) {
  for (size_t i = 0; i < count; ++i) data[i] /= divisor;
}

void divide_half(const HalfKernels& half, uint16_t* data, size_t count, float divisor) {
  alignas(64) float block[kBlockElements];
  for (size_t done = 0; done < count; done += kBlockElements) {
    const size_t length = std::min(kBlockElements, count - done);
    half.widen(block, data + done, length);
    divide_f32(block, length, divisor);
    half.narrow(data + done, block, length);
  }
}

}  // namespace

void divide(DType dtype, void* data, size_t count, int64_t divisor) {
  switch (dtype) {
    case DType::c64: count *= 2; [[fallthrough]];
    case DType::f32:
      return divide_f32(static_cast<float*>(data), count, static_cast<float>(divisor));
    case DType::c128: count *= 2; [[fallthrough]];
    case DType::f64:
      return divide_f64(static_cast<double*>(data), count, static_cast<double>(divisor));
    case DType::f16:
      return divide_half(f16_kernels(), static_cast<uint16_t*>(data), count,
                         static_cast<float>(divisor));
    case DType::bf16:
      return divide_half(bf16_kernels(), static_cast<uint16_t*>(data), count,
                         static_cast<float>(divisor));
    default: throw InvalidRequestError(std::string("division has no meaning for ") + name(dtype));
  }
}

}  // namespace comm_core
