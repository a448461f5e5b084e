// Compares kernels with naive code: all types and operations, aliasing, odd lengths, alignments.
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "base/errors.h"
#include "reduce/fold.h"
#include "reduce/kernels.h"
#include "typed.h"

using namespace comm_core;
using namespace comm_core::testing;

namespace {

const DType kTypes[] = {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i8,  DType::i16,
                        DType::i32, DType::i64, DType::u8,  DType::b8,   DType::c64, DType::c128};
const ReduceOp kOps[] = {ReduceOp::sum,     ReduceOp::avg,  ReduceOp::min, ReduceOp::max,
                         ReduceOp::product, ReduceOp::band, ReduceOp::bor, ReduceOp::bxor};
const size_t kCounts[] = {0, 1, 2, 7, 2047, 2048, 2049, 10007};
constexpr int kMaxSources = 8;

int failures = 0;

__attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
  if (++failures > 30) return;
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
}

bool is_complex(DType dtype) { return dtype == DType::c64 || dtype == DType::c128; }
bool is_half(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }
bool is_floating(DType dtype) {
  return is_half(dtype) || dtype == DType::f32 || dtype == DType::f64;
}

bool same_half(DType dtype, uint16_t a, uint16_t b) {
  return a == b || (std::isnan(naive_widen(dtype, a)) && std::isnan(naive_widen(dtype, b)));
}

// --- Naive reductions.

template <class T>
T naive_apply(ReduceOp op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (op == ReduceOp::sum || op == ReduceOp::avg) return a + b;
    if (op == ReduceOp::product) return a * b;
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
    if (op == ReduceOp::min) return a < b ? a : b;
    return a > b ? a : b;
  } else if constexpr (std::is_same_v<T, bool>) {
    if (op == ReduceOp::sum || op == ReduceOp::max || op == ReduceOp::bor) return a || b;
    if (op == ReduceOp::bxor) return a != b;
    return a && b;
  } else if constexpr (std::is_integral_v<T>) {
    const uint64_t x = static_cast<uint64_t>(a);
    const uint64_t y = static_cast<uint64_t>(b);
    switch (op) {
      case ReduceOp::sum: return static_cast<T>(x + y);
      case ReduceOp::product: return static_cast<T>(x * y);
      case ReduceOp::min: return std::min(a, b);
      case ReduceOp::max: return std::max(a, b);
      case ReduceOp::band: return static_cast<T>(x & y);
      case ReduceOp::bor: return static_cast<T>(x | y);
      default: return static_cast<T>(x ^ y);
    }
  } else {
    return op == ReduceOp::product ? a * b : a + b;
  }
}

void naive_reduce(DType dtype, ReduceOp op, char* dst, const void* const* srcs, int n,
                  size_t count) {
  if (n == 1) {
    std::memcpy(dst, srcs[0], count * size_of(dtype));
    return;
  }
  as_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    for (size_t i = 0; i < count; ++i) {
      Wide<T> result(load<T>(srcs[0], i));
      for (int k = 1; k < n; ++k) result = naive_apply(op, result, Wide<T>(load<T>(srcs[k], i)));
      store(dst, i, T(result));
    }
  });
}

// Equality bit for bit, except that any NaN equals any other and complex zeros may differ in sign.
bool same(DType dtype, const char* a, const char* b) {
  if (std::memcmp(a, b, size_of(dtype)) == 0) return true;
  return as_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const Wide<T> x(load<T>(a, 0)), y(load<T>(b, 0));
    return kComplex<T> ? x == y : x != x && y != y;
  });
}

// --- Data.

std::mt19937 generator(12345);

// Integers are random bits. Floats are, in equal parts, random bits (infinities, NaNs, subnormals)
// and numbers from -3.17 to 3.17. Complex values are small whole numbers, whose results are exact
// in any order of evaluation.
void fill(DType dtype, char* data, size_t count) {
  for (size_t i = 0; i < count * size_of(dtype); ++i) data[i] = static_cast<char>(generator());
  as_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    for (size_t i = 0; i < count; ++i) {
      const float number = (static_cast<float>(generator() % 20001) - 10000.0f) * 0.000317f;
      if constexpr (kComplex<T>) {
        using Part = typename T::value_type;
        store(data, i, T(Part(generator() % 7) - 3, Part(generator() % 7) - 3));
      } else if constexpr (std::is_same_v<T, bool>) {
        store(data, i, generator() % 2 == 0);
      } else if constexpr (!std::is_integral_v<T>) {
        if (generator() % 2 == 0) store(data, i, T(number));
      }
    }
  });
}

// A buffer for `count` elements that starts `offset` elements after a vector boundary.
class Buffer {
 public:
  Buffer(DType dtype, size_t count, size_t offset)
      : bytes_(size_of(dtype) * count), offset_(size_of(dtype) * offset) {
    memory_.assign(kSlack + offset_ + bytes_ + kSlack, kFill);
  }
  char* data() { return aligned() + offset_; }
  // True if nothing outside data() was written.
  bool intact() {
    for (char* p = memory_.data(); p < data(); ++p) {
      if (*p != kFill) return false;
    }
    for (char* p = data() + bytes_; p < memory_.data() + memory_.size(); ++p) {
      if (*p != kFill) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kSlack = 128;
  static constexpr char kFill = 0x5a;
  char* aligned() { return memory_.data() + 64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64; }
  size_t bytes_;
  size_t offset_;
  std::vector<char> memory_;
};

// --- Tests.

void check_case(DType dtype, ReduceOp op, int n, size_t count, std::vector<Buffer>& sources) {
  static size_t dst_offset = 0;
  const size_t size = size_of(dtype);
  std::vector<const void*> srcs;
  for (int k = 0; k < n; ++k) srcs.push_back(sources[k].data());
  std::vector<char> wanted(count * size + 1);
  naive_reduce(dtype, op, wanted.data(), srcs.data(), n, count);

  for (bool streaming : {false, true}) {
    for (int alias = -1; alias < n; ++alias) {
      dst_offset = (dst_offset + 5) % 32;
      Buffer dst(dtype, count, dst_offset);
      std::vector<const void*> from = srcs;
      if (alias >= 0) {
        std::memcpy(dst.data(), srcs[alias], count * size);
        from[alias] = dst.data();
      }
      reduce(dtype, op, dst.data(), from.data(), n, count, streaming);
      for (size_t i = 0; i < count; ++i) {
        if (same(dtype, dst.data() + i * size, wanted.data() + i * size)) continue;
        fail("%s %s: %d sources, element %zu of %zu, dst is source %d, streaming %d\n", name(dtype),
             name(op), n, i, count, alias, streaming);
        break;
      }
      if (!dst.intact()) {
        fail("%s %s: %d sources, %zu elements: wrote outside dst\n", name(dtype), name(op), n,
             count);
      }
    }
  }
}

void test_reduce() {
  for (DType dtype : kTypes) {
    std::vector<Buffer> sources;
    const size_t longest = kCounts[std::size(kCounts) - 1];
    for (int k = 0; k < kMaxSources; ++k) {
      sources.emplace_back(dtype, longest, static_cast<size_t>(k * 3 % 8));
    }
    for (Buffer& source : sources) fill(dtype, source.data(), longest);
    for (ReduceOp op : kOps) {
      if (!supports(dtype, op)) continue;
      for (int n : {1, 2, 3, 4, 5, 8}) {
        for (size_t count : kCounts) check_case(dtype, op, n, count, sources);
      }
    }
  }
}

void test_supports() {
  for (DType dtype : kTypes) {
    for (ReduceOp op : kOps) {
      const bool bitwise = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
      const bool ordered = op == ReduceOp::min || op == ReduceOp::max;
      bool wanted = true;
      if (is_floating(dtype))
        wanted = !bitwise;
      else if (is_complex(dtype))
        wanted = !bitwise && !ordered;
      else
        wanted = op != ReduceOp::avg;
      if (supports(dtype, op) != wanted) {
        fail("supports(%s, %s) is not %d\n", name(dtype), name(op), wanted);
      }
      if (wanted) continue;
      const void* srcs[] = {nullptr, nullptr};
      try {
        reduce(dtype, op, nullptr, srcs, 2, 0);
        fail("%s %s: accepted, but unsupported\n", name(dtype), name(op));
      } catch (const InvalidRequestError&) {
      }
    }
  }
}

void test_bool_bytes() {
  // Other libraries than torch may store true as any byte except 0.
  const uint8_t a[] = {0, 0, 2, 4};
  const uint8_t b[] = {0, 3, 0, 8};
  const void* srcs[] = {a, b};
  const std::pair<ReduceOp, const char*> cases[] = {
      {ReduceOp::sum, "\0\1\1\1"}, {ReduceOp::product, "\0\0\0\1"}, {ReduceOp::bxor, "\0\1\1\0"}};
  for (const auto& [op, wanted] : cases) {
    uint8_t got[4];
    reduce(DType::b8, op, got, srcs, 2, 4);
    if (std::memcmp(got, wanted, 4) != 0) fail("bool %s of bytes above 1\n", name(op));
  }
}

// Checks `widen` and `narrow` on all patterns, and at and next to the midpoints between neighbours.
void check_half(DType dtype, const char* what, void (*widen)(float*, const uint16_t*, size_t),
                void (*narrow)(uint16_t*, const float*, size_t)) {
  std::vector<uint16_t> patterns(65536);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  std::vector<float> values(patterns.size());
  widen(values.data(), patterns.data(), patterns.size());
  for (size_t i = 0; i < patterns.size(); ++i) {
    const double wanted = naive_widen(dtype, patterns[i]);
    if (std::isnan(wanted) ? !std::isnan(values[i])
                           : values[i] != wanted || std::signbit(values[i]) != (i >= 0x8000)) {
      fail("%s %s: wrong result of widening %04zx\n", what, name(dtype), i);
    }
  }

  std::vector<uint16_t> back(values.size());
  narrow(back.data(), values.data(), values.size());
  for (size_t i = 0; i < back.size(); ++i) {
    if (same_half(dtype, back[i], patterns[i])) continue;
    fail("%s %s: %04zx changed when widened and narrowed\n", what, name(dtype), i);
  }

  const uint16_t infinity = dtype == DType::f16 ? 0x7c00 : 0x7f80;
  std::vector<float> hard;
  std::vector<uint16_t> wanted;
  for (int sign : {0, 0x8000}) {
    for (int i = 0; i < infinity; ++i) {
      const uint16_t low = static_cast<uint16_t>(i | sign);
      const uint16_t high = static_cast<uint16_t>(low + 1);
      // After the largest number: the value that would follow it if there were no infinity.
      const double next = i + 1 < infinity ? naive_widen(dtype, high)
                                           : 2 * naive_widen(dtype, low) -
                                                 naive_widen(dtype, static_cast<uint16_t>(low - 1));
      const float middle = static_cast<float>((naive_widen(dtype, low) + next) / 2);
      hard.insert(hard.end(), {std::nextafter(middle, 0.0f), middle,
                               std::nextafter(middle, sign ? -INFINITY : INFINITY)});
      wanted.insert(wanted.end(), {low, (low & 1) ? high : low, high});
    }
  }
  for (int i = 0; i < 1000000; ++i) {
    const float any = std::bit_cast<float>(static_cast<uint32_t>(generator()));
    hard.push_back(any);
    wanted.push_back(naive_narrow(dtype, any));
  }
  std::vector<uint16_t> got(hard.size());
  narrow(got.data(), hard.data(), hard.size());
  for (size_t i = 0; i < hard.size(); ++i) {
    if (same_half(dtype, got[i], wanted[i])) continue;
    fail("%s %s: %a became %04x, not %04x\n", what, name(dtype), hard[i], got[i], wanted[i]);
  }
}

void test_half() {
  const HalfKernels& f16 = f16_kernels();
  const HalfKernels& bf16 = bf16_kernels();
  check_half(DType::f16, "vector", f16.widen, f16.narrow);
  check_half(DType::f16, "portable", widen_all<Float16>, narrow_all<Float16>);
  check_half(DType::bf16, "vector", bf16.widen, bf16.narrow);
  check_half(DType::bf16, "portable", widen_all<BFloat16>, narrow_all<BFloat16>);
}

void test_divide() {
  for (DType dtype : kTypes) {
    const bool whole = !is_floating(dtype) && !is_complex(dtype);
    const size_t count = 4099;
    Buffer data(dtype, count, 3);
    fill(dtype, data.data(), count);
    std::vector<char> before(data.data(), data.data() + count * size_of(dtype));
    try {
      divide(dtype, data.data(), count, 3);
      if (whole) fail("division of %s: accepted, but unsupported\n", name(dtype));
    } catch (const InvalidRequestError&) {
      if (!whole) fail("division of %s: refused, but supported\n", name(dtype));
    }
    if (whole) continue;
    as_type(dtype, [&](auto zero) {
      using T = decltype(zero);
      for (size_t i = 0; i < count; ++i) {
        T wanted(load<T>(before.data(), i));
        if constexpr (kComplex<T>) {
          wanted = {wanted.real() / 3, wanted.imag() / 3};
        } else {
          wanted = T(Wide<T>(wanted) / 3);
        }
        store(before.data(), i, wanted);
        const size_t at = i * sizeof(T);
        if (same(dtype, before.data() + at, data.data() + at)) continue;
        fail("division of %s: element %zu is wrong\n", name(dtype), i);
        break;
      }
    });
    if (!data.intact()) fail("division of %s wrote outside the buffer\n", name(dtype));
  }
}

void test_copy() {
  for (size_t bytes : {0, 1, 63, 64, 65, 127, 128, 1000, 100003}) {
    for (size_t to = 0; to < 64; to += 7) {
      for (size_t from = 0; from < 64; from += 9) {
        Buffer src(DType::u8, bytes, from);
        Buffer dst(DType::u8, bytes, to);
        fill(DType::u8, src.data(), bytes);
        copy(dst.data(), src.data(), bytes, true);
        if (std::memcmp(dst.data(), src.data(), bytes) != 0 || !dst.intact()) {
          fail("wrong streaming copy of %zu bytes from offset %zu to %zu\n", bytes, from, to);
        }
      }
    }
  }
}

// Averages of float16 values whose sums overflow float16: with one to many sources, with or without
// a partial average, and in place.
void test_average_f16() {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> draw(-60000, 60000);
  for (int num_srcs : {1, 2, 3, 8}) {
    for (size_t count : kCounts) {
      for (int in_place : {0, 1, 2}) {  // the output is: separate, a source, the partial averages
        for (bool on_top : {false, true}) {
          if (in_place == 2 && !on_top) continue;
          std::vector<uint16_t> partial(count), own(count), wanted(count);
          std::vector<std::vector<uint16_t>> srcs(size_t(num_srcs), own);
          for (size_t i = 0; i < count; ++i) {
            float sum = 0;
            for (auto& src : srcs) {
              src[i] = naive_narrow(DType::f16, draw(random));
              sum += naive_widen(DType::f16, src[i]);
            }
            partial[i] = naive_narrow(DType::f16, draw(random) / 100);
            const float before = on_top ? naive_widen(DType::f16, partial[i]) : 0;
            wanted[i] = naive_narrow(DType::f16, before + sum / float(num_srcs + 1));
          }
          std::vector<const void*> pointers;
          for (auto& src : srcs) pointers.push_back(src.data());
          auto& out = in_place == 0 ? own : in_place == 1 ? srcs.back() : partial;
          average_f16(out.data(), on_top ? partial.data() : nullptr, pointers.data(), num_srcs,
                      count, num_srcs + 1);
          for (size_t i = 0; i < count; ++i) {
            if (same_half(DType::f16, out[i], wanted[i])) continue;
            fail("average_f16 of %d, %zu elements: [%zu] is %04x, not %04x\n", num_srcs, count, i,
                 out[i], wanted[i]);
            break;
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  test_supports();
  test_bool_bytes();
  test_half();
  test_divide();
  test_average_f16();
  test_copy();
  test_reduce();
  std::printf("kernels_test: %d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
