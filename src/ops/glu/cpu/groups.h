// y = f(gate) * up, and its gradient, for any element type and instruction set. A vector of the gate and the vector of
// up behind it make a vector of y.
#pragma once

#include "cpu/activation_slope.h"
#include "ops/glu/cpu/kernels.h"

namespace blocksparse::glu {
namespace {

// Calls body(where a vector of the gate begins in z, its first hidden feature, how many features are left).
template <int W, class Body>
BS_INLINE void for_vectors(int64_t hidden, int64_t first, int64_t last, Body&& body) {
  static_assert(kInterleaved % W == 0);
  for (int64_t group = first; group < last; ++group) {
    for (int64_t i = 0; i < kInterleaved; i += W) {
      const int64_t feature = group * kInterleaved + i;
      body(2 * group * kInterleaved + i, feature, hidden - feature);
    }
  }
}

template <DType D>
struct Groups {
  using T = Element<D>;
  using S = Sum<D>;
  static constexpr int W = least(kLanes<S>, static_cast<int>(kInterleaved));

  static void forward(const Forward& f, int64_t token, int64_t first, int64_t last) {
    const T* z = static_cast<const T*>(f.z) + token * f.z_token;
    T* y = static_cast<T*>(f.y) + token * f.y_token;
    for_vectors<W>(f.hidden, first, last,
                   [&](int64_t at, int64_t feature, int64_t count) __attribute__((always_inline)) {
                     const Vec<S, W> gate = load_as<S, W>(z + at), up = load_as<S, W>(z + at + kInterleaved);
                     store_first<S, W>(y + feature, activate<S, W>(f.activation, gate) * up, count);
                   });
  }

  static void backward(const Backward& b, int64_t token, int64_t first, int64_t last) {
    const T* z = static_cast<const T*>(b.z) + token * b.z_token;
    const T* dy = static_cast<const T*>(b.dy) + token * b.dy_token;
    T* dz = static_cast<T*>(b.dz) + token * b.dz_token;
    for_vectors<W>(b.hidden, first, last,
                   [&](int64_t at, int64_t feature, int64_t count) __attribute__((always_inline)) {
                     const Vec<S, W> gate = load_as<S, W>(z + at), up = load_as<S, W>(z + at + kInterleaved);
                     const Vec<S, W> d = load_first<S, W>(dy + feature, count);
                     const ValueAndSlope<S, W> of = activate_with_slope<S, W>(b.activation, gate);
                     Vec<S, W> dgate = d * up * of.slope, dup = d * of.value;
                     for (int64_t lane = count < 0 ? 0 : count; lane < W; ++lane) dgate[lane] = dup[lane] = 0;
                     store_as<S, W>(dz + at, dgate);
                     store_as<S, W>(dz + at + kInterleaved, dup);
                   });
  }
};

template <DType D>
GroupKernel make_groups(Isa isa) {
  return {.isa = isa, .dtype = D, .forward = Groups<D>::forward, .backward = Groups<D>::backward};
}

}  // namespace
}  // namespace blocksparse::glu
