#include "reduce/kernels.h"

#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/errors.h"
#include "reduce/fold.h"
#include "reduce/ops.h"

namespace comm_core {
namespace {

COMM_CORE_CLONES
void sum_f32(void* out, const void* const* srcs, int num_srcs, size_t start, size_t count) {
  fold_plain<float, Sum>(out, srcs, num_srcs, start, count);
}

COMM_CORE_CLONES
void sum_f64(void* out, const void* const* srcs, int num_srcs, size_t start, size_t count) {
  fold_plain<double, Sum>(out, srcs, num_srcs, start, count);
}

template <class T, class Op>
void fold(void* out, const void* const* srcs, int num_srcs, size_t start, size_t count) {
  fold_plain<T, Op>(out, srcs, num_srcs, start, count);
}

template <const HalfKernels& (*kernels)(), class Op>
void fold_half(void* out, const void* const* srcs, int num_srcs, size_t start, size_t count) {
  const HalfKernels& half = kernels();
  alignas(64) float acc[kBlockElements];
  alignas(64) float next[kBlockElements];
  for (size_t done = 0; done < count; done += kBlockElements) {
    const size_t length = std::min(kBlockElements, count - done);
    half.widen(acc, source<uint16_t>(srcs, 0, start + done), length);
    for (int k = 1; k < num_srcs; ++k) {
      half.widen(next, source<uint16_t>(srcs, k, start + done), length);
      const void* const pair[] = {acc, next};
      fold<float, Op>(acc, pair, 2, 0, length);
    }
    half.narrow(static_cast<uint16_t*>(out) + done, acc, length);
  }
}

// Chooses the kernel for a type without bitwise reductions, or returns null.
Fold find_number(ReduceOp op, Fold sum, Fold product, Fold min = nullptr, Fold max = nullptr) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg: return sum;
    case ReduceOp::product: return product;
    case ReduceOp::min: return min;
    case ReduceOp::max: return max;
    default: return nullptr;
  }
}

template <class T>
Fold find_floating(ReduceOp op, Fold sum) {
  return find_number(op, sum, fold<T, Product>, fold<T, Min>, fold<T, Max>);
}

template <const HalfKernels& (*kernels)()>
Fold find_half(ReduceOp op) {
  return find_number(op, kernels().sum, fold_half<kernels, Product>, fold_half<kernels, Min>,
                     fold_half<kernels, Max>);
}

template <class T>
Fold find_integer(ReduceOp op) {
  // Only min and max depend on the sign. The signed types use the unsigned kernels for the rest.
  using U = std::make_unsigned_t<T>;
  switch (op) {
    case ReduceOp::sum: return fold<U, WrappingSum>;
    case ReduceOp::min: return fold<T, Min>;
    case ReduceOp::max: return fold<T, Max>;
    case ReduceOp::product: return fold<U, WrappingProduct>;
    case ReduceOp::band: return fold<U, And>;
    case ReduceOp::bor: return fold<U, Or>;
    case ReduceOp::bxor: return fold<U, Xor>;
    default: return nullptr;
  }
}

Fold find_bool(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::max:
    case ReduceOp::bor: return fold<uint8_t, BoolOr>;
    case ReduceOp::product:
    case ReduceOp::min:
    case ReduceOp::band: return fold<uint8_t, BoolAnd>;
    case ReduceOp::bxor: return fold<uint8_t, BoolXor>;
    default: return nullptr;
  }
}

Fold find(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::f32: return find_floating<float>(op, sum_f32);
    case DType::f64: return find_floating<double>(op, sum_f64);
    case DType::f16: return find_half<f16_kernels>(op);
    case DType::bf16: return find_half<bf16_kernels>(op);
    case DType::i8: return find_integer<int8_t>(op);
    case DType::i16: return find_integer<int16_t>(op);
    case DType::i32: return find_integer<int32_t>(op);
    case DType::i64: return find_integer<int64_t>(op);
    case DType::u8: return find_integer<uint8_t>(op);
    case DType::u16: return find_integer<uint16_t>(op);
    case DType::u32: return find_integer<uint32_t>(op);
    case DType::u64: return find_integer<uint64_t>(op);
    case DType::b8: return find_bool(op);
    case DType::c64: return find_number(op, sum_f32, fold<Complex<float>, ComplexProduct>);
    case DType::c128: return find_number(op, sum_f64, fold<Complex<double>, ComplexProduct>);
    default: return nullptr;
  }
}

// Returns the number of elements before the first 64-byte boundary of dst. Stores that cross a
// cache line cost twice as much.
size_t elements_to_boundary(const void* dst, size_t size, size_t count) {
  const size_t bytes = -reinterpret_cast<uintptr_t>(dst) % 64;
  return std::min(count, bytes / size);
}

// Folds into a block in the L1 cache and copies it to dst. Needed if there are more sources than
// one pass takes, because dst may be one of the later ones. Also used for streaming, because only
// whole cache lines should bypass the cache.
void reduce_by_block(Fold fold, size_t size, char* dst, const void* const* srcs, int num_srcs,
                     size_t count, bool streaming) {
  alignas(64) char block[kBlockBytes];
  const size_t per_block = std::min(kBlockElements, kBlockBytes / size);
  size_t length = elements_to_boundary(dst, size, count);
  if (length == 0) length = std::min(per_block, count);
  for (size_t done = 0; done < count; length = std::min(per_block, count - done)) {
    fold(block, srcs, num_srcs, done, length);
    if (streaming) {
      stream_out(dst + done * size, block, length * size);
    } else {
      std::memcpy(dst + done * size, block, length * size);
    }
    done += length;
  }
  if (streaming) stream_fence();
}

}  // namespace

bool supports(DType dtype, ReduceOp op) { return find(dtype, op) != nullptr; }

void reduce(DType dtype, ReduceOp op, void* dst, const void* const* srcs, int num_srcs,
            size_t count, bool streaming) {
  const Fold fold = find(dtype, op);
  if (fold == nullptr) {
    throw InvalidRequestError(std::string(name(op)) + " has no meaning for " + name(dtype));
  }
  size_t size = size_of(dtype);
  if (num_srcs == 1) return copy(dst, srcs[0], count * size, streaming);
  if ((dtype == DType::c64 || dtype == DType::c128) && op != ReduceOp::product) {
    size /= 2;  // real and imaginary parts are added separately
    count *= 2;
  }
  streaming = streaming && std::find(srcs, srcs + num_srcs, dst) == srcs + num_srcs;
  char* const out = static_cast<char*>(dst);
  if (num_srcs > kMaxFused || streaming) {
    return reduce_by_block(fold, size, out, srcs, num_srcs, count, streaming);
  }
  const size_t head = elements_to_boundary(dst, size, count);
  if (head > 0) fold(out, srcs, num_srcs, 0, head);
  fold(out + head * size, srcs, num_srcs, head, count - head);
}

#if defined(__x86_64__)

namespace {

constexpr size_t kLine = 64;

// dst is aligned to a cache line and bytes is a multiple of one. Each line is written as a whole,
// so that it leaves the write-combining buffer in one transfer.
void stream_lines(char* dst, const char* src, size_t bytes) {
  for (size_t i = 0; i < bytes; i += kLine) {
    const __m128i* from = reinterpret_cast<const __m128i*>(src + i);
    __m128i* to = reinterpret_cast<__m128i*>(dst + i);
    __m128i line[4];
    for (int k = 0; k < 4; ++k) line[k] = _mm_loadu_si128(from + k);
    for (int k = 0; k < 4; ++k) _mm_stream_si128(to + k, line[k]);
  }
}

__attribute__((target("avx512f"))) void stream_lines_avx512(char* dst, const char* src,
                                                            size_t bytes) {
  for (size_t i = 0; i < bytes; i += kLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
  }
}

using StreamLines = void (*)(char*, const char*, size_t);

StreamLines choose_stream_lines() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") ? stream_lines_avx512 : stream_lines;
}

}  // namespace

void stream_out(void* dst, const void* src, size_t bytes) {
  static const StreamLines lines = choose_stream_lines();
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  const size_t misaligned = reinterpret_cast<uintptr_t>(to) % kLine;
  const size_t head = std::min(bytes, misaligned == 0 ? 0 : kLine - misaligned);
  const size_t body = (bytes - head) / kLine * kLine;
  std::memcpy(to, from, head);
  lines(to + head, from + head, body);
  std::memcpy(to + head + body, from + head + body, bytes - head - body);
}

void stream_fence() { _mm_sfence(); }

#else

void stream_out(void* dst, const void* src, size_t bytes) { std::memcpy(dst, src, bytes); }
void stream_fence() {}

#endif

void copy(void* dst, const void* src, size_t bytes, bool streaming) {
  if (bytes == 0 || dst == src) return;
  if (!streaming) {
    std::memcpy(dst, src, bytes);
    return;
  }
  stream_out(dst, src, bytes);
  stream_fence();
}

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

void average_f16(void* dst, const void* partial, const void* const* srcs, int num_srcs,
                 size_t count, int64_t divisor) {
  const HalfKernels& half = f16_kernels();
  alignas(64) float acc[kBlockElements];
  alignas(64) float next[kBlockElements];
  for (size_t done = 0; done < count; done += kBlockElements) {
    const size_t length = std::min(kBlockElements, count - done);
    half.widen(acc, source<uint16_t>(srcs, 0, done), length);
    for (int k = 1; k < num_srcs; ++k) {
      half.widen(next, source<uint16_t>(srcs, k, done), length);
      const void* const pair[] = {acc, next};
      sum_f32(acc, pair, 2, 0, length);
    }
    divide_f32(acc, length, static_cast<float>(divisor));
    if (partial != nullptr) {
      half.widen(next, static_cast<const uint16_t*>(partial) + done, length);
      const void* const pair[] = {next, acc};
      sum_f32(acc, pair, 2, 0, length);
    }
    half.narrow(static_cast<uint16_t*>(dst) + done, acc, length);
  }
}

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
