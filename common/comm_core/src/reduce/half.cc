#include "reduce/fold.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define COMM_CORE_AVX512 __attribute__((target("avx512f")))
#define COMM_CORE_F16C __attribute__((target("avx2,f16c")))
#endif

namespace comm_core {
namespace {

COMM_CORE_CLONES
void sum_bf16(void* out, const void* const* srcs, int num_srcs, size_t start, size_t count) {
  sum_half<BFloat16>(out, srcs, num_srcs, start, count);
}

COMM_CORE_CLONES
void widen_bf16(float* out, const uint16_t* in, size_t count) {
  widen_all<BFloat16>(out, in, count);
}

COMM_CORE_CLONES
void narrow_bf16(uint16_t* out, const float* in, size_t count) {
  narrow_all<BFloat16>(out, in, count);
}

void sum_f16(void* out, const void* const* srcs, int num_srcs, size_t start, size_t count) {
  sum_half<Float16>(out, srcs, num_srcs, start, count);
}

void widen_f16(float* out, const uint16_t* in, size_t count) { widen_all<Float16>(out, in, count); }

void narrow_f16(uint16_t* out, const float* in, size_t count) {
  narrow_all<Float16>(out, in, count);
}

#if defined(__x86_64__)

// Intrinsics, because compilers translate the portable code to some twenty operations per vector in
// place of one conversion instruction. The results are bit-identical. The zero-masking forms mask
// nothing: they avoid a warning of g++ 12 about its own header in the plain forms.
constexpr __mmask16 kAll = 0xffff;
constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

COMM_CORE_AVX512
inline __m512 load_avx512(const uint16_t* p) {
  return _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

COMM_CORE_AVX512
inline void store_avx512(uint16_t* p, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(kAll, x, kNearestEven));
}

COMM_CORE_AVX512
void sum_f16_avx512(void* out, const void* const* srcs, int num_srcs, size_t start, size_t count) {
  uint16_t* const result = static_cast<uint16_t*>(out);
  size_t i = 0;
  for (; i + 64 <= count; i += 64) {
    const uint16_t* p = source<uint16_t>(srcs, 0, start + i);
    __m512 sums[4];  // four independent sums, so that no addition waits for the previous one
    for (int j = 0; j < 4; ++j) sums[j] = load_avx512(p + 16 * j);
    for (int k = 1; k < num_srcs; ++k) {
      p = source<uint16_t>(srcs, k, start + i);
      for (int j = 0; j < 4; ++j) sums[j] = _mm512_add_ps(sums[j], load_avx512(p + 16 * j));
    }
    for (int j = 0; j < 4; ++j) store_avx512(result + i + 16 * j, sums[j]);
  }
  sum_f16(result + i, srcs, num_srcs, start + i, count - i);
}

COMM_CORE_AVX512
void widen_f16_avx512(float* out, const uint16_t* in, size_t count) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) _mm512_storeu_ps(out + i, load_avx512(in + i));
  widen_f16(out + i, in + i, count - i);
}

COMM_CORE_AVX512
void narrow_f16_avx512(uint16_t* out, const float* in, size_t count) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) store_avx512(out + i, _mm512_loadu_ps(in + i));
  narrow_f16(out + i, in + i, count - i);
}

COMM_CORE_F16C
inline __m256 load_f16c(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

COMM_CORE_F16C
inline void store_f16c(uint16_t* p, __m256 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, kNearestEven));
}

COMM_CORE_F16C
void sum_f16_f16c(void* out, const void* const* srcs, int num_srcs, size_t start, size_t count) {
  uint16_t* const result = static_cast<uint16_t*>(out);
  size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const uint16_t* p = source<uint16_t>(srcs, 0, start + i);
    __m256 sums[4];  // four independent sums, so that no addition waits for the previous one
    for (int j = 0; j < 4; ++j) sums[j] = load_f16c(p + 8 * j);
    for (int k = 1; k < num_srcs; ++k) {
      p = source<uint16_t>(srcs, k, start + i);
      for (int j = 0; j < 4; ++j) sums[j] = _mm256_add_ps(sums[j], load_f16c(p + 8 * j));
    }
    for (int j = 0; j < 4; ++j) store_f16c(result + i + 8 * j, sums[j]);
  }
  sum_f16(result + i, srcs, num_srcs, start + i, count - i);
}

COMM_CORE_F16C
void widen_f16_f16c(float* out, const uint16_t* in, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(out + i, load_f16c(in + i));
  widen_f16(out + i, in + i, count - i);
}

COMM_CORE_F16C
void narrow_f16_f16c(uint16_t* out, const float* in, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) store_f16c(out + i, _mm256_loadu_ps(in + i));
  narrow_f16(out + i, in + i, count - i);
}

#endif

HalfKernels choose_f16() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) {
    return {sum_f16_avx512, widen_f16_avx512, narrow_f16_avx512};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    return {sum_f16_f16c, widen_f16_f16c, narrow_f16_f16c};
  }
#endif
  return {sum_f16, widen_f16, narrow_f16};
}

}  // namespace

const HalfKernels& f16_kernels() {
  static const HalfKernels kernels = choose_f16();
  return kernels;
}

const HalfKernels& bf16_kernels() {
  static const HalfKernels kernels = {sum_bf16, widen_bf16, narrow_bf16};
  return kernels;
}

}  // namespace comm_core
