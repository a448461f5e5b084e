// Loops, half-precision formats and declarations that the files of the reduce kernels share.
// Private to them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#if defined(__clang__)
#define COMM_CORE_NO_LOOP_DEPENDENCE _Pragma("clang loop vectorize(assume_safety)")
#else
#define COMM_CORE_NO_LOOP_DEPENDENCE _Pragma("GCC ivdep")
#endif

// Compiles a function for several vector widths; one version is chosen when the library is loaded.
// This needs ifunc and so glibc. Elsewhere the function is compiled once, for the base machine. The
// same holds with ThreadSanitizer, because the code that chooses would call its run-time before
// that is loaded.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__)
#define COMM_CORE_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define COMM_CORE_CLONES
#endif

// Functions that a clone calls use its instructions only if they are inlined into it.
#define COMM_CORE_INLINE inline __attribute__((always_inline))

namespace comm_core {

// An accumulator of this many elements fits into the L1 cache beside the sources that are read.
constexpr size_t kBlockElements = 2048;
constexpr size_t kBlockBytes = 8192;

// Computes out[i] = srcs[0][start + i] op srcs[1][start + i] op ... for i < count, num_srcs >= 2.
// With up to kMaxFused sources, `out` may be one of them (at the same offset) and `count` is not
// limited. With more, `out` must not overlap any source and count <= kBlockElements.
using Fold = void (*)(void* out, const void* const* srcs, int num_srcs, size_t start, size_t count);
constexpr int kMaxFused = 4;

// Kernels of a half-precision format. All arithmetic is in float32.
struct HalfKernels {
  Fold sum;
  void (*widen)(float* out, const uint16_t* in, size_t count);
  void (*narrow)(uint16_t* out, const float* in, size_t count);
};

const HalfKernels& f16_kernels();
const HalfKernels& bf16_kernels();

// Copies like memcpy, but bypasses the caches. The caller must call stream_fence before it lets
// another thread read `dst`.
void stream_out(void* dst, const void* src, size_t bytes);
void stream_fence();

// Format of a type that is stored as it is computed.
template <class T>
struct Plain {
  using Stored = T;
  static COMM_CORE_INLINE T widen(T x) { return x; }
  static COMM_CORE_INLINE T narrow(T x) { return x; }
};

// Returns `yes` or `no` without a branch. Compilers may turn `?:` around floating-point arithmetic
// into a branch, which they do not vectorise.
COMM_CORE_INLINE uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = -static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

// Both formats avoid branches, so that compilers vectorise the loops. They also avoid float
// subnormals, so that the caller's flush-to-zero mode has no effect on the results.
struct BFloat16 {
  using Stored = uint16_t;
  static COMM_CORE_INLINE float widen(uint16_t x) {
    return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
  }
  static COMM_CORE_INLINE uint16_t narrow(float x) {
    return static_cast<uint16_t>(rounded(x) >> 16);
  }
  // The result is in the upper half.
  static COMM_CORE_INLINE uint32_t rounded(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t nearest = bits + 0x7fff + ((bits >> 16) & 1);
    // Rounding could carry a NaN into infinity; the quiet bit keeps it a NaN.
    const uint32_t quiet = bits | 0x400000;
    return (bits & 0x7fffffff) > 0x7f800000 ? quiet : nearest;
  }
};

struct Float16 {
  using Stored = uint16_t;
  static COMM_CORE_INLINE float widen(uint16_t x) {
    constexpr uint32_t kExponentShift = (127 - 15) << 23;
    constexpr uint32_t kSmallestNormal = (127 - 14) << 23;
    const uint32_t sign = (x & 0x8000u) << 16;
    const uint32_t magnitude = x & 0x7fffu;
    const uint32_t shifted = magnitude << 13;
    const uint32_t normal = shifted + kExponentShift;
    const uint32_t quiet = magnitude > 0x7c00 ? 0x400000 : 0;
    const uint32_t special = shifted | 0x7f800000 | quiet;
    // 2^-14 * (1 + m / 1024) - 2^-14 is exact and normalises the subnormal m * 2^-24.
    const uint32_t subnormal = std::bit_cast<uint32_t>(
        std::bit_cast<float>(shifted | kSmallestNormal) - std::bit_cast<float>(kSmallestNormal));
    const uint32_t finite = select(magnitude < 0x0400, subnormal, normal);
    return std::bit_cast<float>(select(magnitude >= 0x7c00, special, finite) | sign);
  }
  static COMM_CORE_INLINE uint16_t narrow(float x) {
    constexpr uint32_t kExponentShift = (127 - 15) << 23;
    constexpr uint32_t kSmallestNormal = (127 - 14) << 23;
    constexpr uint32_t kTooLarge = (127 + 16) << 23;
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - kExponentShift + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // The last bit of 0.5f is 2^-24, as that of a subnormal float16: the addition rounds.
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t quiet = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    const uint32_t finite = select(magnitude < kSmallestNormal, subnormal, normal);
    const uint32_t special = select(magnitude > 0x7f800000, quiet, 0x7c00);
    const uint32_t half = select(magnitude >= kTooLarge, special, finite);
    return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000));
  }
};

struct Sum {
  template <class T>
  static COMM_CORE_INLINE T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
};

template <class T>
COMM_CORE_INLINE const T* source(const void* const* srcs, int k, size_t start) {
  return static_cast<const T*>(srcs[k]) + start;
}

// Folds `first` with the sources k, k + 1, ... in one pass, `more` sources (1 to 3) in all. The
// formats Out, First and Next are those of the result, of `first` and of the sources.
template <class Out, class First, class Next, class Op>
COMM_CORE_INLINE void fold_pass(typename Out::Stored* out, const typename First::Stored* first,
                                const void* const* srcs, int k, int more, size_t start,
                                size_t count) {
  using T = typename Next::Stored;
  const T* a = source<T>(srcs, k, start);
  if (more == 1) {
    COMM_CORE_NO_LOOP_DEPENDENCE
    for (size_t i = 0; i < count; ++i) {
      out[i] = Out::narrow(Op::apply(First::widen(first[i]), Next::widen(a[i])));
    }
    return;
  }
  const T* b = source<T>(srcs, k + 1, start);
  if (more == 2) {
    COMM_CORE_NO_LOOP_DEPENDENCE
    for (size_t i = 0; i < count; ++i) {
      const auto x = Op::apply(First::widen(first[i]), Next::widen(a[i]));
      out[i] = Out::narrow(Op::apply(x, Next::widen(b[i])));
    }
    return;
  }
  const T* c = source<T>(srcs, k + 2, start);
  COMM_CORE_NO_LOOP_DEPENDENCE
  for (size_t i = 0; i < count; ++i) {
    const auto x = Op::apply(First::widen(first[i]), Next::widen(a[i]));
    const auto y = Op::apply(x, Next::widen(b[i]));
    out[i] = Out::narrow(Op::apply(y, Next::widen(c[i])));
  }
}

// Fold for the types that accumulate in their own precision.
template <class T, class Op>
COMM_CORE_INLINE void fold_plain(void* out, const void* const* srcs, int num_srcs, size_t start,
                                 size_t count) {
  T* const result = static_cast<T*>(out);
  const T* first = source<T>(srcs, 0, start);
  for (int k = 1; k < num_srcs; k += kMaxFused - 1) {
    const int more = std::min(kMaxFused - 1, num_srcs - k);
    fold_pass<Plain<T>, Plain<T>, Plain<T>, Op>(result, first, srcs, k, more, start, count);
    first = result;
  }
}

template <class Format>
COMM_CORE_INLINE void widen_all(float* out, const uint16_t* in, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = Format::widen(in[i]);
}

template <class Format>
COMM_CORE_INLINE void narrow_all(uint16_t* out, const float* in, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = Format::narrow(in[i]);
}

// Fold for f16 and bf16: adds all sources in float32 and rounds once.
template <class Format>
COMM_CORE_INLINE void sum_half(void* out, const void* const* srcs, int num_srcs, size_t start,
                               size_t count) {
  uint16_t* const result = static_cast<uint16_t*>(out);
  const uint16_t* first = source<uint16_t>(srcs, 0, start);
  if (num_srcs <= kMaxFused) {
    fold_pass<Format, Format, Format, Sum>(result, first, srcs, 1, num_srcs - 1, start, count);
    return;
  }
  alignas(64) float acc[kBlockElements];
  widen_all<Format>(acc, first, count);
  for (int k = 1; k < num_srcs; k += kMaxFused - 1) {
    const int more = std::min(kMaxFused - 1, num_srcs - k);
    fold_pass<Plain<float>, Plain<float>, Format, Sum>(acc, acc, srcs, k, more, start, count);
  }
  narrow_all<Format>(result, acc, count);
}

}  // namespace comm_core
