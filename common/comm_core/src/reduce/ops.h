// Element-wise operations on two values. Private to the reduce kernels.
#pragma once

#include <cstdint>
#include <type_traits>

namespace comm_core {

// Unsigned type to compute in, so that overflow wraps and is defined. Narrow types are promoted.
template <class T>
using Wrapping = std::conditional_t<sizeof(T) <= 4, uint32_t, uint64_t>;

struct WrappingSum {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(Wrapping<T>(a) + Wrapping<T>(b));
  }
};

struct WrappingProduct {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(Wrapping<T>(a) * Wrapping<T>(b));
  }
};

struct Product {
  static auto apply(auto a, decltype(a) b) { return a * b; }
};

// Returns NaN if either value is NaN: with b NaN no comparison holds, with a NaN a != a holds.
struct Min {
  static auto apply(auto a, decltype(a) b) { return (a < b || a != a) ? a : b; }
};

struct Max {
  static auto apply(auto a, decltype(a) b) { return (a > b || a != a) ? a : b; }
};

struct And {
  static auto apply(auto a, decltype(a) b) { return static_cast<decltype(a)>(a & b); }
};

struct Or {
  static auto apply(auto a, decltype(a) b) { return static_cast<decltype(a)>(a | b); }
};

struct Xor {
  static auto apply(auto a, decltype(a) b) { return static_cast<decltype(a)>(a ^ b); }
};

// Bool is stored as a byte; any value but 0 is true.
struct BoolAnd {
  static uint8_t apply(uint8_t a, uint8_t b) { return (a != 0) & (b != 0); }
};

struct BoolOr {
  static uint8_t apply(uint8_t a, uint8_t b) { return (a | b) != 0; }
};

struct BoolXor {
  static uint8_t apply(uint8_t a, uint8_t b) { return (a != 0) ^ (b != 0); }
};

// Own type, because std::complex multiplies through a library call that repairs infinities, which
// torch does not.
template <class T>
struct Complex {
  T re;
  T im;
};

struct ComplexProduct {
  template <class T>
  static Complex<T> apply(Complex<T> a, Complex<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

}  // namespace comm_core
