// Elements of every type as C++ values. Half precision follows its definition, without bit tricks.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>

#include "base/types.h"

namespace comm_core::testing {

struct HalfFormat {
  int fraction_bits;
  int bias;
};

inline HalfFormat format_of(DType dtype) {
  return dtype == DType::f16 ? HalfFormat{10, 15} : HalfFormat{7, 127};
}

inline double naive_widen(DType dtype, uint16_t x) {
  const HalfFormat f = format_of(dtype);
  const int fraction = x & ((1 << f.fraction_bits) - 1);
  const int exponent = (x & 0x7fff) >> f.fraction_bits;
  double value;
  if (exponent == (1 << (15 - f.fraction_bits)) - 1) {
    value = fraction == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    value = std::ldexp(fraction, 1 - f.bias - f.fraction_bits);
  } else {
    value = std::ldexp(fraction + (1 << f.fraction_bits), exponent - f.bias - f.fraction_bits);
  }
  return (x & 0x8000) ? -value : value;
}

inline uint16_t naive_narrow(DType dtype, float x) {
  const HalfFormat f = format_of(dtype);
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const uint16_t infinity = 0x7fff >> f.fraction_bits << f.fraction_bits;
  if (std::isnan(x)) return sign | infinity | 1;
  if (std::isinf(x)) return sign | infinity;
  // Rounds to a multiple of the unit in the last place, ties to even. The next larger magnitude has
  // the next pattern, also across exponents and from the largest number to infinity.
  int exponent = 1 - f.bias;
  if (x != 0) exponent = std::max(exponent, std::ilogb(x));
  const double steps = std::nearbyint(std::ldexp(std::fabs(x), f.fraction_bits - exponent));
  const int pattern = static_cast<int>(steps) + ((exponent + f.bias - 1) << f.fraction_bits);
  return sign | static_cast<uint16_t>(std::min<int>(pattern, infinity));
}

template <DType kType>
struct Half {
  uint16_t bits = 0;
  Half() = default;
  explicit Half(double x) : bits(naive_narrow(kType, static_cast<float>(x))) {}
  explicit operator float() const { return static_cast<float>(naive_widen(kType, bits)); }
  explicit operator double() const { return naive_widen(kType, bits); }
};

// The type in which values of a type are added.
template <class T>
struct WideOf {
  using type = T;
};
template <DType kType>
struct WideOf<Half<kType>> {
  using type = float;
};
template <class T>
using Wide = typename WideOf<T>::type;

template <class T>
constexpr bool kComplex =
    std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>;

// Calls `f` with a value of the type.
template <class F>
auto as_type(DType dtype, F f) {
  switch (dtype) {
    case DType::f32: return f(float());
    case DType::f64: return f(double());
    case DType::f16: return f(Half<DType::f16>());
    case DType::bf16: return f(Half<DType::bf16>());
    case DType::i8: return f(int8_t());
    case DType::i16: return f(int16_t());
    case DType::i32: return f(int32_t());
    case DType::i64: return f(int64_t());
    case DType::u8: return f(uint8_t());
    case DType::b8: return f(bool());
    case DType::c64: return f(std::complex<float>());
    default: return f(std::complex<double>());
  }
}

template <class T>
T load(const void* data, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void store(void* data, size_t i, T value) {
  std::memcpy(static_cast<char*>(data) + i * sizeof(T), &value, sizeof(T));
}

}  // namespace comm_core::testing
