// The layer norm on the CPU: rows are tasks; the gradients of gain and shift, strips of columns.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/convert.h"
#include "cpu/threads.h"
#include "ops/norm/norm.h"

namespace blocksparse::norm {

namespace {

constexpr int kLanes = 16;               // sums side by side, which the compiler makes vectors of
constexpr int64_t kColumns = 256;        // of a task
constexpr int64_t kLeastWork = 1 << 14;  // elements that are worth another thread

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

template <class T>
using SumOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

float widen(Bf16 x) { return bf16_to_float(x.bits); }
float widen(F16 x) { return f16_to_float(x.bits); }
float widen(float x) { return x; }
double widen(double x) { return x; }

template <class T>
T narrow(SumOf<T> x) {
  if constexpr (std::is_same_v<T, Bf16>) return {float_to_bf16(x)};
  else if constexpr (std::is_same_v<T, F16>) return {float_to_f16(x)};
  else return x;
}

// The sum of value(i), in an order that depends on count alone.
template <class S, class Value>
S sum_of(int64_t count, Value value) {
  S lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += value(i + lane);
  }
  for (; i < count; ++i) lanes[i % kLanes] += value(i);
  S sum = 0;
  for (const S lane : lanes) sum += lane;
  return sum;
}

template <class T>
const T* at(const void* data, int64_t offset) {
  return data == nullptr ? nullptr : static_cast<const T*>(data) + offset;
}
template <class T>
T* at(void* data, int64_t offset) {
  return data == nullptr ? nullptr : static_cast<T*>(data) + offset;
}

// Relu, Factor and Term are known to the compiler, so that it makes vectors.
template <class T, bool Relu, bool Factor, bool Term>
void forward_row(const Forward& f, int64_t row) {
  using S = SumOf<T>;
  const int64_t h = f.features, group = row % f.groups;
  const T *x = at<T>(f.x, row * h), *factor = at<T>(f.factor, row * h), *term = at<T>(f.term, row * h);
  const S *gain = at<S>(f.gain, group * h), *shift = at<S>(f.shift, group * h);
  const S mean = sum_of<S>(h, [&](int64_t i) { return widen(x[i]); }) / static_cast<S>(h);
  const S variance = sum_of<S>(h, [&](int64_t i) { return (widen(x[i]) - mean) * (widen(x[i]) - mean); });
  const S scale = 1 / std::sqrt(variance / static_cast<S>(h) + static_cast<S>(f.epsilon));
  S* stats = at<S>(f.stats, row * 2);
  stats[0] = mean, stats[1] = scale;
  T* y = at<T>(f.y, row * h);
  for (int64_t i = 0; i < h; ++i) {
    S z = (widen(x[i]) - mean) * scale * gain[i] + shift[i];
    if constexpr (Factor) z *= widen(factor[i]);
    if constexpr (Term) z += widen(term[i]);
    if constexpr (Relu) z = z < 0 ? 0 : z;
    y[i] = narrow<T>(z);
  }
}

template <class T, bool... Known>
void forward(const Forward& f, int32_t threads) {
  parallel_for(threads, f.rows(), [&](int64_t row) { forward_row<T, Known...>(f, row); });
}

template <class T>
void forward_known(const Forward& f, int32_t threads) {
  const int known = 4 * static_cast<int>(f.relu) + 2 * (f.factor != nullptr) + (f.term != nullptr);
  switch (known) {
    case 0: return forward<T, false, false, false>(f, threads);
    case 1: return forward<T, false, false, true>(f, threads);
    case 2: return forward<T, false, true, false>(f, threads);
    case 3: return forward<T, false, true, true>(f, threads);
    case 4: return forward<T, true, false, false>(f, threads);
    case 5: return forward<T, true, false, true>(f, threads);
    case 6: return forward<T, true, true, false>(f, threads);
    default: return forward<T, true, true, true>(f, threads);
  }
}

// A sequence: its four gates and their cell. Plain, for on the CPU the LSTM op's cell is faster behind a norm.
template <class T>
void cell_row(const CellForward& f, int64_t token) {
  using S = SumOf<T>;
  constexpr int64_t kGates = 4;
  const int64_t h = f.features;
  const T* z = at<T>(f.z, token * kGates * h);
  S means[kGates], scales[kGates];
  for (int64_t g = 0; g < kGates; ++g) {
    const T* x = z + g * h;
    const S mean = sum_of<S>(h, [&](int64_t i) { return widen(x[i]); }) / static_cast<S>(h);
    const S variance = sum_of<S>(h, [&](int64_t i) { return (widen(x[i]) - mean) * (widen(x[i]) - mean); });
    means[g] = mean, scales[g] = 1 / std::sqrt(variance / static_cast<S>(h) + static_cast<S>(f.epsilon));
    S* stats = at<S>(f.stats, (token * kGates + g) * 2);
    if (stats != nullptr) stats[0] = means[g], stats[1] = scales[g];
  }
  const S *gain = at<S>(f.gain, 0), *shift = at<S>(f.shift, 0), *before = at<S>(f.c_before, token * h);
  T *y = at<T>(f.h, token * h), *gates = at<T>(f.gates, token * kGates * h);
  S* c = at<S>(f.c, token * h);
  const auto logistic = [](S x) { return 1 / (1 + std::exp(-x)); };
  for (int64_t i = 0; i < h; ++i) {
    S unit[kGates];
    for (int64_t g = 0; g < kGates; ++g) {
      const int64_t e = g * h + i;
      unit[g] = (widen(z[e]) - means[g]) * scales[g] * gain[e] + shift[e];
      unit[g] = g == 2 ? std::tanh(unit[g]) : logistic(unit[g]);
      if (gates != nullptr) gates[e] = narrow<T>(unit[g]);
    }
    c[i] = unit[1] * before[i] + unit[0] * unit[2];
    y[i] = narrow<T>(unit[3] * std::tanh(c[i]));
  }
}

// What both gradients need of a row. Relu and Factor are known to the compiler, so that it makes vectors.
template <class T, bool Relu, bool Factor>
struct Row {
  using S = SumOf<T>;
  const T *x, *dy, *y, *factor;
  S mean, scale;

  Row(const Backward& b, int64_t row)
      : x(at<T>(b.x, row * b.features)),
        dy(at<T>(b.dy, row * b.features)),
        y(at<T>(b.y, row * b.features)),
        factor(at<T>(b.factor, row * b.features)),
        mean(at<S>(b.stats, row * 2)[0]),
        scale(at<S>(b.stats, row * 2)[1]) {}
  S normed(int64_t i) const { return (widen(x[i]) - mean) * scale; }
  S of_z(int64_t i) const {
    const S g = widen(dy[i]);
    if constexpr (Relu) return widen(y[i]) > 0 ? g : 0;
    return g;
  }
  S of_affine(int64_t i) const {
    if constexpr (Factor) return of_z(i) * widen(factor[i]);
    return of_z(i);
  }
};

template <class T, bool Relu, bool Factor>
void backward_row(const Backward& b, int64_t index) {
  using S = SumOf<T>;
  const Row<T, Relu, Factor> row(b, index);
  const int64_t h = b.features, group = index % b.groups, whole = h / kLanes * kLanes;
  const S *gain = at<S>(b.gain, group * h), *shift = at<S>(b.shift, group * h);
  S firsts[kLanes] = {}, seconds[kLanes] = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const S scaled = row.of_affine(i + lane) * gain[i + lane];
      firsts[lane] += scaled;
      seconds[lane] += scaled * row.normed(i + lane);
    }
  }
  S first = 0, second = 0;
  for (int lane = 0; lane < kLanes; ++lane) first += firsts[lane], second += seconds[lane];
  for (int64_t i = whole; i < h; ++i) {
    const S scaled = row.of_affine(i) * gain[i];
    first += scaled, second += scaled * row.normed(i);
  }
  first /= static_cast<S>(h), second /= static_cast<S>(h);
  T *dx = at<T>(b.dx, index * h), *dfactor = at<T>(b.dfactor, index * h), *dterm = at<T>(b.dterm, index * h);
  for (int64_t i = 0; i < h; ++i) {
    dx[i] = narrow<T>(row.scale * (row.of_affine(i) * gain[i] - first - row.normed(i) * second));
  }
  for (int64_t i = 0; dfactor != nullptr && i < h; ++i) {
    dfactor[i] = narrow<T>(row.of_z(i) * (row.normed(i) * gain[i] + shift[i]));
  }
  for (int64_t i = 0; dterm != nullptr && i < h; ++i) dterm[i] = narrow<T>(row.of_z(i));
}

// dgain and dshift of some columns of one group, token after token.
template <class T, bool Relu, bool Factor>
void backward_columns(const Backward& b, int64_t group, int64_t first, int64_t last) {
  using S = SumOf<T>;
  S of_gain[kColumns] = {}, of_shift[kColumns] = {};
  for (int64_t token = 0; token < b.n; ++token) {
    const Row<T, Relu, Factor> row(b, token * b.groups + group);
    for (int64_t i = 0; i < last - first; ++i) {
      const S g = row.of_affine(first + i);
      of_gain[i] += g * row.normed(first + i);
      of_shift[i] += g;
    }
  }
  std::copy_n(of_gain, last - first, at<S>(b.dgain, group * b.features + first));
  std::copy_n(of_shift, last - first, at<S>(b.dshift, group * b.features + first));
}

template <class T, bool Relu, bool Factor>
void backward(const Backward& b, int32_t threads) {
  const int64_t strips = (b.features + kColumns - 1) / kColumns;
  if (b.dx != nullptr) {
    parallel_for(threads, b.rows(), [&](int64_t row) { backward_row<T, Relu, Factor>(b, row); });
  }
  if (b.dgain == nullptr) return;
  parallel_for(threads, b.groups * strips, [&](int64_t i) {
    const int64_t first = i % strips * kColumns;
    backward_columns<T, Relu, Factor>(b, i / strips, first, std::min(first + kColumns, b.features));
  });
}

template <class Body>
void with_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::f32: return body.template operator()<float>();
    case DType::f64: return body.template operator()<double>();
    case DType::bf16: return body.template operator()<Bf16>();
    case DType::f16: return body.template operator()<F16>();
  }
}

int32_t worthwhile(int32_t threads, int64_t elements) {
  return static_cast<int32_t>(std::clamp<int64_t>(elements / kLeastWork, 1, threads));
}

}  // namespace

Status cpu_forward(const Forward& f, int32_t threads) {
  threads = worthwhile(threads, f.rows() * f.features);
  with_type(f.dtype, [&]<class T>() { forward_known<T>(f, threads); });
  return {};
}

Status cpu_cell_forward(const CellForward& f, int32_t threads) {
  threads = worthwhile(threads, f.n * 4 * f.features);
  with_type(f.dtype, [&]<class T>() { parallel_for(threads, f.n, [&](int64_t token) { cell_row<T>(f, token); }); });
  return {};
}

Status cpu_backward(const Backward& b, int32_t threads) {
  threads = worthwhile(threads, b.rows() * b.features);
  with_type(b.dtype, [&]<class T>() {
    if (b.factor != nullptr) return b.relu ? backward<T, true, true>(b, threads) : backward<T, false, true>(b, threads);
    return b.relu ? backward<T, true, false>(b, threads) : backward<T, false, false>(b, threads);
  });
  return {};
}

}  // namespace blocksparse::norm
