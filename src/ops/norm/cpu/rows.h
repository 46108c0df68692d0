// The layer norm of a row for any element type and instruction set.
//   forward    three passes over the row, which lies in L1: mean, variance, result
//   backward   two passes: the row's two sums, then dx, dfactor and dterm
//   columns    dgain and dshift of 64 columns, token after token, with sums in registers
// Sums are kept lane by lane and added last, in an order that depends on the length of the row alone.
#pragma once

#include "cpu/simd.h"
#include "ops/norm/cpu/kernels.h"

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

// A row is walked in whole vectors first, then in the rest of it. With both in one loop the sums lie on the stack.
struct Whole {};
struct Rest {
  int64_t count;
};

template <int L, class Body>
BS_INLINE void for_vectors(int64_t first, int64_t last, Body&& body) {
  int64_t i = first;
  for (; i + L <= last; i += L) body(i, Whole{});
  if (i < last) body(i, Rest{last - i});
}

template <class C, class T>
BS_INLINE typename C::V load(const T* p, Whole) {
  return load_as<typename C::S, C::lanes>(p);
}
template <class C, class T>
BS_INLINE typename C::V load(const T* p, Rest rest) {  // zeros behind the end
  return load_first<typename C::S, C::lanes>(p, rest.count);
}
template <class C, class T>
BS_INLINE void store(T* p, typename C::V v, Whole) {
  store_as<typename C::S, C::lanes>(p, v);
}
template <class C, class T>
BS_INLINE void store(T* p, typename C::V v, Rest rest) {
  store_first<typename C::S, C::lanes>(p, v, rest.count);
}
template <class V>
BS_INLINE V kept(V v, Whole) {
  return v;
}
template <class V>
BS_INLINE V kept(V v, Rest rest) {  // zeros behind the end
  for (int64_t lane = rest.count; lane < static_cast<int64_t>(sizeof(V) / sizeof(v[0])); ++lane) v[lane] = 0;
  return v;
}

// The sum of term(i, part) over a row. Even and odd vectors have sums of their own, because one sum waits for itself: a
// forward pass takes 14 % less.
template <class C, class Term>
BS_INLINE typename C::S sum_over(int64_t h, Term&& term) {
  constexpr int L = C::lanes;
  typename C::V even{}, odd{};
  const int64_t pairs = h / (2 * L) * (2 * L);
  for (int64_t i = 0; i < pairs; i += 2 * L) even += term(i, Whole{}), odd += term(i + L, Whole{});
  for_vectors<L>(pairs, h, [&](int64_t i, auto part) { even += term(i, part); });
  return sum_of_lanes<typename C::S, L>(even + odd);
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
  const S mean = sum_over<C>(h, [&](int64_t i, auto part) { return load<C>(x + i, part); }) / static_cast<S>(h);
  const S variance = sum_over<C>(h,
                                 [&](int64_t i, auto part) {
                                   const V d = kept(load<C>(x + i, part) - mean, part);
                                   return d * d;
                                 }) /
                     static_cast<S>(h);
  const S scale = 1 / static_cast<S>(__builtin_sqrt(variance + static_cast<S>(f.epsilon)));
  S* stats = at<S>(f.stats, row * 2);
  stats[0] = mean, stats[1] = scale;
  T* y = at<T>(f.y, row * h);
  for_vectors<L>(0, h, [&](int64_t i, auto part) {
    V z = (load<C>(x + i, part) - mean) * scale * load<C>(gain + i, part) + load<C>(shift + i, part);
    if (factor != nullptr) z *= load<C>(factor + i, part);
    if (term != nullptr) z += load<C>(term + i, part);
    if (f.relu) z = z < 0 ? V{} : z;
    store<C>(y + i, z, part);
  });
}

// The parts of a row that both gradients read.
template <class C>
struct Row {
  using S = typename C::S;
  using T = typename C::T;
  using V = typename C::V;
  const T *x, *dy, *y, *factor;
  S mean, scale;

  Row(const Backward& b, int64_t row)
      : x(at<T>(b.x, row * b.features)),
        dy(at<T>(b.dy, row * b.features)),
        y(b.relu ? at<T>(b.y, row * b.features) : nullptr),
        factor(at<T>(b.factor, row * b.features)),
        mean(at<S>(b.stats, row * 2)[0]),
        scale(at<S>(b.stats, row * 2)[1]) {}
  template <class Part>
  BS_INLINE V normed(int64_t i, Part part) const {
    return (load<C>(x + i, part) - mean) * scale;
  }
  template <class Part>
  BS_INLINE V of_z(int64_t i, Part part) const {
    const V g = load<C>(dy + i, part);
    return y == nullptr ? g : load<C>(y + i, part) > 0 ? g : V{};
  }
  template <class Part>
  BS_INLINE V of_affine(int64_t i, V g, Part part) const {
    return factor == nullptr ? g : g * load<C>(factor + i, part);
  }
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
  for_vectors<L>(0, h, [&](int64_t i, auto part) {
    const V scaled = row.of_affine(i, row.of_z(i, part), part) * load<C>(gain + i, part);
    firsts += scaled;
    seconds += scaled * row.normed(i, part);
  });
  const S first = sum_of_lanes<S, L>(firsts) / static_cast<S>(h),
          second = sum_of_lanes<S, L>(seconds) / static_cast<S>(h);
  T *dx = at<T>(b.dx, index * h), *dfactor = at<T>(b.dfactor, index * h), *dterm = at<T>(b.dterm, index * h);
  for_vectors<L>(0, h, [&](int64_t i, auto part) {
    const V g = row.of_z(i, part), n = row.normed(i, part), of_gain = load<C>(gain + i, part);
    store<C>(dx + i, row.scale * (row.of_affine(i, g, part) * of_gain - first - n * second), part);
    if (dfactor != nullptr) store<C>(dfactor + i, g * (n * of_gain + load<C>(shift + i, part)), part);
    if (dterm != nullptr) store<C>(dterm + i, g, part);
  });
}

// The columns of some neighbouring vectors, or of the last vector.
template <class C, int Vectors, class Part>
BS_INLINE void columns_at(const Backward& b, int64_t group, int64_t begin, Part part) {
  using S = typename C::S;
  using V = typename C::V;
  V of_gain[Vectors] = {}, of_shift[Vectors] = {};
  for (int64_t token = 0; token < b.n; ++token) {
    const Row<C> row(b, token * b.groups + group);
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      const int64_t i = begin + v * C::lanes;
      const V g = row.of_affine(i, row.of_z(i, part), part);
      of_gain[v] += g * row.normed(i, part);
      of_shift[v] += g;
    }
  }
  S *dgain = at<S>(b.dgain, group * b.features + begin), *dshift = at<S>(b.dshift, group * b.features + begin);
  for (int v = 0; v < Vectors; ++v, dgain += C::lanes, dshift += C::lanes) {
    if (b.accumulate) of_gain[v] += load<C>(dgain, part), of_shift[v] += load<C>(dshift, part);
    store<C>(dgain, of_gain[v], part);
    store<C>(dshift, of_shift[v], part);
  }
}

template <class C>
void columns(const Backward& b, int64_t group, int64_t first) {
  constexpr int L = C::lanes, kVectors = 4, kAtOnce = kVectors * L;
  static_assert(kColumnsOfTask % kAtOnce == 0);
  const int64_t last = least(first + kColumnsOfTask, b.features);
  int64_t i = first;
  for (; i + kAtOnce <= last; i += kAtOnce) columns_at<C, kVectors>(b, group, i, Whole{});
  for_vectors<L>(i, last, [&](int64_t begin, auto part) { columns_at<C, 1>(b, group, begin, part); });
}

template <class C>
RowKernel make_rows(Isa isa) {
  return {isa, C::dtype, forward_row<C>, backward_row<C>, columns<C>};
}

}  // namespace
}  // namespace blocksparse::norm
