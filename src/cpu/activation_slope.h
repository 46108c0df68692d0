// Activations and their derivatives over vectors: f32 by the polynomials of activation.h, f64 by the C library.
#pragma once

#include "cpu/activation.h"

namespace blocksparse {
namespace {

template <class S, int N>
struct ValueAndSlope {
  Vec<S, N> value, slope;
};

// The normal density at z, times sqrt(2 pi), and Phi(z).
template <int N>
struct Normal {
  Vec<float, N> density, below;
};

// Phi(z) by the polynomial of gelu.
template <int N>
BS_INLINE Normal<N> normal(Vec<float, N> z) {
  using F = Vec<float, N>;
  const F a = z < 0.0f ? -z : z, density = exponential<N>(-0.5f * a * a), tail = density * scaled_tail<N>(a);
  return {density, z > 0.0f ? 1.0f - tail : tail};
}

template <int N>
BS_INLINE ValueAndSlope<float, N> gelu_with_slope(Vec<float, N> z) {
  const Normal<N> of = normal<N>(z);
  return {z * of.below, of.below + z * of.density * 0.398942280f};
}

template <int N>
BS_INLINE ValueAndSlope<double, N> gelu_with_slope(Vec<double, N> z) {
  ValueAndSlope<double, N> of;
  for (int i = 0; i < N; ++i) {
    const double below = 0.5 * ::erfc(-z[i] * 0.70710678118654752440);
    of.value[i] = z[i] * below;
    of.slope[i] = below + z[i] * ::exp(-0.5 * z[i] * z[i]) * 0.39894228040143267794;
  }
  return of;
}

template <class S, int N>
BS_INLINE ValueAndSlope<S, N> activate_with_slope(Activation activation, Vec<S, N> z) {
  using V = Vec<S, N>;
  switch (activation) {
    case Activation::none: return {z, V{} + S{1}};
    case Activation::relu: return {z < S{0} ? V{} : z, z <= S{0} ? V{} : V{} + S{1}};
    case Activation::gelu: return gelu_with_slope<N>(z);
    case Activation::silu: {
      const V s = logistic<N>(z);
      return {z * s, s + z * s * (S{1} - s)};
    }
    case Activation::gelu_tanh: {
      const V s = logistic<N>(twice_u<S, N>(z));
      const V steepness = S(1.59576912160573071176) + S(3 * 0.07135481627260025) * z * z;
      return {z * s, s + z * s * (S{1} - s) * steepness};
    }
  }
  return {z, V{} + S{1}};
}

}  // namespace
}  // namespace blocksparse
