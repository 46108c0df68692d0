// Activations over vectors. Those of f32 are polynomials, within 4 ulp of max(|z|, 1). Those of f64 call the C library
// lane by lane.
// lane.
#pragma once

#include <math.h>

#include "blocksparse/ops.h"
#include "cpu/simd.h"

namespace blocksparse {
namespace {

// exp(x) = 2^k exp(r) with x = k ln 2 + r, |r| <= ln 2 / 2. The polynomial for (exp(r) - 1 - r) / r^2 is our minimax
// fit (relative error of exp 3e-9). 2^k goes into the exponent in two halves, so results may be subnormal.
template <int N>
BS_INLINE Vec<float, N> exponential(Vec<float, N> x) {
  using F = Vec<float, N>;
  using I = Vec<int32_t, N>;
  const F high = F{} + 89.0f, low = F{} - 104.0f;  // infinite above, 0 below
  x = x > high ? high : x;                         // NaN stays NaN
  x = x < low ? low : x;
  const F round = F{} + 0x1.8p23f;  // adding it rounds to an integer
  const F k = (x * 1.44269504f + round) - round;
  const F r = (x - k * 0x1.62e4p-1f) - k * 0x1.7f7d1cp-20f;  // ln 2 in two parts, the first short enough to be exact
  F p = F{} + 1.3814596e-3f;
  p = p * r + 8.3687171e-3f;
  p = p * r + 4.1668388e-2f;
  p = p * r + 1.6666521e-1f;
  p = p * r + 4.9999993e-1f;
  p = p * r * r + r + 1.0f;
  const I exponent = __builtin_convertvector(k, I);
  const I half = exponent >> 1;
  return p * bits_as<F>((half + 127) << 23) * bits_as<F>((exponent - half + 127) << 23);
}

template <int N>
BS_INLINE Vec<float, N> logistic(Vec<float, N> z) {
  return 1.0f / (1.0f + exponential<N>(-z));
}

// tanh: for small z our minimax fit of (tanh(z) / z - 1) / z^2 (relative error of tanh 5e-9), otherwise through exp.
template <int N>
BS_INLINE Vec<float, N> hyperbolic_tangent(Vec<float, N> z) {
  using F = Vec<float, N>;
  const F a = z < 0.0f ? -z : z, s = z * z;
  F p = F{} - 5.7049841e-3f;
  p = p * s + 2.0639084e-2f;
  p = p * s - 5.3739715e-2f;
  p = p * s + 1.3331442e-1f;
  p = p * s - 3.3333281e-1f;
  const F large = 1.0f - 2.0f / (1.0f + exponential<N>(2.0f * a));
  return a < 0.625f ? z + z * s * p : (z < 0.0f ? -large : large);
}

template <int N>
BS_INLINE Vec<double, N> logistic(Vec<double, N> z) {
  for (int i = 0; i < N; ++i) z[i] = 1 / (1 + ::exp(-z[i]));
  return z;
}

template <int N>
BS_INLINE Vec<double, N> hyperbolic_tangent(Vec<double, N> z) {
  for (int i = 0; i < N; ++i) z[i] = ::tanh(z[i]);
  return z;
}

template <int N>
BS_INLINE Vec<float, N> silu(Vec<float, N> z) {
  return z / (1.0f + exponential<N>(-z));
}

// Phi(-a) / exp(-a^2 / 2) for a >= 0, as P(t) with t = 1 / (1 + 0.3 a); P is our minimax fit of erfcx (relative error
// 6e-8 up to a = 14.5, where exp(-a^2 / 2) has left f32).
template <int N>
BS_INLINE Vec<float, N> scaled_tail(Vec<float, N> a) {
  using F = Vec<float, N>;
  const F t = 1.0f / (1.0f + 0.3f * a);
  F p = F{} + 3.8407572e-2f;
  p = p * t - 1.6930830e-1f;
  p = p * t + 2.2895343e-1f;
  p = p * t - 7.6841446e-2f;
  p = p * t + 1.4276643e-1f;
  p = p * t + 9.4585403e-2f;
  p = p * t + 1.2194537e-1f;
  p = p * t + 1.1948419e-1f;
  return p * t + 7.3731446e-6f;
}

// z Phi(z).
template <int N>
BS_INLINE Vec<float, N> gelu(Vec<float, N> z) {
  using F = Vec<float, N>;
  const F a = z < 0.0f ? -z : z;
  const F tail = exponential<N>(-0.5f * a * a) * scaled_tail<N>(a);
  const F above = z - (a > 14.5f ? F{} : a * tail);  // otherwise inf - inf * 0 would give NaN
  return z > 0.0f ? above : z * tail;
}

template <int N>
BS_INLINE Vec<double, N> gelu(Vec<double, N> z) {
  for (int i = 0; i < N; ++i) z[i] = z[i] * 0.5 * ::erfc(-z[i] * 0.70710678118654752440);
  return z;
}

template <int N>
BS_INLINE Vec<double, N> silu(Vec<double, N> z) {
  for (int i = 0; i < N; ++i) z[i] = z[i] / (1 + ::exp(-z[i]));
  return z;
}

// z / (1 + exp(-2 u)), u = sqrt(2 / pi) (z + 0.044715 z^3).
template <class S, int N>
BS_INLINE Vec<S, N> twice_u(Vec<S, N> z) {
  return z * (S(1.59576912160573071176) + S(0.07135481627260025) * z * z);
}

template <int N>
BS_INLINE Vec<float, N> gelu_tanh(Vec<float, N> z) {
  return z / (1.0f + exponential<N>(-twice_u<float, N>(z)));
}

template <int N>
BS_INLINE Vec<double, N> gelu_tanh(Vec<double, N> z) {
  const Vec<double, N> u = twice_u<double, N>(z);
  for (int i = 0; i < N; ++i) z[i] = z[i] / (1 + ::exp(-u[i]));
  return z;
}

template <class S, int N>
BS_INLINE Vec<S, N> activate(Activation activation, Vec<S, N> z) {
  switch (activation) {
    case Activation::none: return z;
    case Activation::relu: return z < S{0} ? Vec<S, N>{} : z;  // NaN stays NaN
    case Activation::gelu: return gelu<N>(z);
    case Activation::silu: return silu<N>(z);
    case Activation::gelu_tanh: return gelu_tanh<N>(z);
  }
  return z;
}

}  // namespace
}  // namespace blocksparse
