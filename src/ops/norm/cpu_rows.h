// The layer norm of a row for any element type and instruction set.
//   forward    three passes over the row, which lies in L1: mean, variance, result
//   backward   two: the row's two sums, then dx, dfactor and dterm
//   columns    dgain and dshift of 64 columns, token after token, their sums in registers
// Sums are kept lane by lane and added last, in an order that depends on the length of the row alone.
#pragma once

#include "cpu/simd.h"
#include "ops/norm/kernels.h"

namespace blocksparse::norm {
namespace {

template <DType D>
struct RowConfig {
  static constexpr DType dtype = D;
  using T = Element<D>;
  using S = Sum<D>;
  static constexpr int lanes = kLanes<S>;
  using V = Vec<S, lanes>;
};

template <class S, int N>
S sum_of_lanes(Vec<S, N> v) {
  S sum = 0;
  for (int lane = 0; lane < N; ++lane) sum += v[lane];
  return sum;
}

template <class T>
BS_INLINE const T* at(const void* data, int64_t offset) {
  return data == nullptr ? nullptr : static_cast<const T*>(data) + offset;
}
template <class T>
BS_INLINE T* at(void* data, int64_t offset) {
  return data == nullptr ? nullptr : static_cast<T*>(data) + offset;
}

// Elements of a row from i on, and zeros behind its end.
template <class C, class T>
BS_INLINE typename C::V load(const T* row, int64_t i, int64_t features) {
  return load_first<typename C::S, C::lanes>(row + i, features - i);
}

template <class C>
void forward_row(const Forward& f, int64_t row) {
  using S = typename C::S;
  using T = typename C::T;
  using V = typename C::V;
  constexpr int L = C::lanes;
  const int64_t h = f.features, group = row % f.groups;
  const T *x = at<T>(f.x, row * h), *factor = at<T>(f.factor, row * h), *term = at<T>(f.term, row * h);
  const S *gain = at<S>(f.gain, group * h), *shift = at<S>(f.shift, group * h);
  V sum{};
  for (int64_t i = 0; i < h; i += L) sum += load<C>(x, i, h);
  const S mean = sum_of_lanes<S, L>(sum) / static_cast<S>(h);
  V squares{};
  int64_t i = 0;
  for (; i + L <= h; i += L) {
    const V d = load_as<S, L>(x + i) - mean;
    squares += d * d;
  }
  S variance = sum_of_lanes<S, L>(squares);
  const V rest = load<C>(x, i, h) - mean;
  for (int lane = 0; lane < h - i; ++lane) variance += rest[lane] * rest[lane];
  const S scale = 1 / static_cast<S>(__builtin_sqrt(variance / static_cast<S>(h) + static_cast<S>(f.epsilon)));
  S* stats = at<S>(f.stats, row * 2);
  stats[0] = mean, stats[1] = scale;
  T* y = at<T>(f.y, row * h);
  for (i = 0; i < h; i += L) {
    V z = (load<C>(x, i, h) - mean) * scale * load<C>(gain, i, h) + load<C>(shift, i, h);
    if (factor != nullptr) z *= load<C>(factor, i, h);
    if (term != nullptr) z += load<C>(term, i, h);
    if (f.relu) z = z < 0 ? V{} : z;
    store_first<S, L>(y + i, z, h - i);
  }
}

// A row of what both gradients read.
template <class C>
struct Row {
  using S = typename C::S;
  using T = typename C::T;
  using V = typename C::V;
  const T *x, *dy, *y, *factor;
  S mean, scale;
  int64_t h;

  Row(const Backward& b, int64_t row)
      : x(at<T>(b.x, row * b.features)),
        dy(at<T>(b.dy, row * b.features)),
        y(b.relu ? at<T>(b.y, row * b.features) : nullptr),
        factor(at<T>(b.factor, row * b.features)),
        mean(at<S>(b.stats, row * 2)[0]),
        scale(at<S>(b.stats, row * 2)[1]),
        h(b.features) {}
  BS_INLINE V normed(int64_t i) const { return (load<C>(x, i, h) - mean) * scale; }
  BS_INLINE V of_z(int64_t i) const {
    const V g = load<C>(dy, i, h);
    return y == nullptr ? g : load<C>(y, i, h) > 0 ? g : V{};
  }
  BS_INLINE V of_affine(int64_t i, V g) const { return factor == nullptr ? g : g * load<C>(factor, i, h); }
};

template <class C>
void backward_row(const Backward& b, int64_t index) {
  using S = typename C::S;
  using T = typename C::T;
  using V = typename C::V;
  constexpr int L = C::lanes;
  const Row<C> row(b, index);
  const int64_t h = b.features, group = index % b.groups;
  const S *gain = at<S>(b.gain, group * h), *shift = at<S>(b.shift, group * h);
  V firsts{}, seconds{};
  for (int64_t i = 0; i < h; i += L) {
    const V scaled = row.of_affine(i, row.of_z(i)) * load<C>(gain, i, h);
    firsts += scaled;
    seconds += scaled * row.normed(i);
  }
  const S first = sum_of_lanes<S, L>(firsts) / static_cast<S>(h),
          second = sum_of_lanes<S, L>(seconds) / static_cast<S>(h);
  T *dx = at<T>(b.dx, index * h), *dfactor = at<T>(b.dfactor, index * h), *dterm = at<T>(b.dterm, index * h);
  for (int64_t i = 0; i < h; i += L) {
    const V g = row.of_z(i), n = row.normed(i), of_gain = load<C>(gain, i, h);
    store_first<S, L>(dx + i, row.scale * (row.of_affine(i, g) * of_gain - first - n * second), h - i);
    if (dfactor != nullptr) store_first<S, L>(dfactor + i, g * (n * of_gain + load<C>(shift, i, h)), h - i);
    if (dterm != nullptr) store_first<S, L>(dterm + i, g, h - i);
  }
}

template <class C>
void columns(const Backward& b, int64_t group, int64_t first) {
  using S = typename C::S;
  using V = typename C::V;
  constexpr int L = C::lanes, kVectors = 4, kAtOnce = kVectors * L;
  static_assert(kStrip % kAtOnce == 0);
  const int64_t h = b.features, last = least(first + kStrip, h);
  for (int64_t begin = first; begin < last; begin += kAtOnce) {
    V of_gain[kVectors] = {}, of_shift[kVectors] = {};
    for (int64_t token = 0; token < b.n; ++token) {
      const Row<C> row(b, token * b.groups + group);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const int64_t i = begin + v * L;
        if (i >= last) continue;
        const V g = row.of_affine(i, row.of_z(i));
        of_gain[v] += g * row.normed(i);
        of_shift[v] += g;
      }
    }
    S *dgain = at<S>(b.dgain, group * h), *dshift = at<S>(b.dshift, group * h);
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = begin + v * L;
      if (i >= last) break;
      if (b.accumulate) of_gain[v] += load<C>(dgain, i, h), of_shift[v] += load<C>(dshift, i, h);
      store_first<S, L>(dgain + i, of_gain[v], h - i);
      store_first<S, L>(dshift + i, of_shift[v], h - i);
    }
  }
}

template <class C>
RowKernel make_rows(Isa isa) {
  return {isa, C::dtype, forward_row<C>, backward_row<C>, columns<C>};
}

}  // namespace
}  // namespace blocksparse::norm
