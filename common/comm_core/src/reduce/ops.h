// Private to the reduce kernels: what the operations do to two elements.
#pragma once

#include <cstdint>
#include <type_traits>

namespace comm_core {

// Narrow integers are promoted, wide ones wrap: unsigned arithmetic keeps overflow defined.
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

// A NaN on either side wins: on the right no comparison holds, on the left a != a does.
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

// Any byte but 0 is true.
struct BoolAnd {
  static uint8_t apply(uint8_t a, uint8_t b) { return (a != 0) & (b != 0); }
};

struct BoolOr {
  static uint8_t apply(uint8_t a, uint8_t b) { return (a | b) != 0; }
};

struct BoolXor {
  static uint8_t apply(uint8_t a, uint8_t b) { return (a != 0) ^ (b != 0); }
};

// std::complex multiplies through a library call that repairs infinities; torch does not.
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
