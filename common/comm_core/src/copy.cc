#include <cstring>

#include "reduce_fold.h"
#include "reduce_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace comm_core {

#if defined(__x86_64__)

namespace {

constexpr size_t kLine = 64;

// dst is aligned to a line, bytes is a multiple of one. A line is written whole, so that it leaves
// the write-combining buffer as one transfer.
void stream_lines(char* dst, const char* src, size_t bytes) {
  for (size_t i = 0; i < bytes; i += kLine) {
    const __m128i* from = reinterpret_cast<const __m128i*>(src + i);
    __m128i* to = reinterpret_cast<__m128i*>(dst + i);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
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

}  // namespace comm_core
