// What the LSTM op means, in plain loops with double sums. It also runs as the instruction set "reference".
#include <cmath>
#include <vector>

#include "core/convert.h"
#include "core/index.h"
#include "ops/lstm/lstm.h"

namespace blocksparse::lstm {

namespace {

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

// Matrices [n, H] of doubles, and W as a list of entries.
struct Plain {
  const Sequence& s;
  int64_t n, hidden;
  explicit Plain(const Sequence& s) : s(s), n(s.n), hidden(s.hidden) {}

  std::vector<double> matrix(int64_t columns) const { return std::vector<double>(static_cast<size_t>(n * columns)); }
  std::vector<double> load(const void* data, int64_t step, int64_t columns, DType dtype) const {
    std::vector<double> m = matrix(columns);
    for (size_t i = 0; data != nullptr && i < m.size(); ++i) {
      m[i] = load_element(data, step * n * columns + static_cast<int64_t>(i), dtype);
    }
    return m;
  }

  // Calls body(row, column, index into w) for each entry of W.
  template <class Body>
  void for_each_weight(Body&& body) const {
    const int64_t b = s.layout.block_size;
    for (int64_t block = 0; block < s.layout.blocks; ++block) {
      const int64_t row = out_of(s.layout)[static_cast<size_t>(block)] * b;
      const int64_t column = walk_of(s.layout, false).refs[static_cast<size_t>(block)].from * b;
      for (int64_t i = 0; i < b * b; ++i) body(row + i / b, column + i % b, block * b * b + i);
    }
  }
};

}  // namespace

void reference_forward(const Forward& f) {
  const Plain p(f);
  const DType state = sum_dtype(f.dtype);
  const int64_t hidden = f.hidden, four = kGates * hidden;
  std::vector<double> h = p.load(f.h0, 0, hidden, f.dtype), c = p.load(f.c0, 0, hidden, state);
  for (int64_t t = 0; t < f.steps; ++t) {
    std::vector<double> z = p.load(f.pre, t, four, f.dtype);
    p.for_each_weight([&](int64_t row, int64_t column, int64_t at) {
      const double w = load_element(f.w, at, f.dtype);
      for (int64_t n = 0; n < f.n; ++n)
        z[static_cast<size_t>(n * four + row)] += w * h[static_cast<size_t>(n * hidden + column)];
    });
    for (int64_t n = 0; n < f.n; ++n) {
      const bool runs = t < f.length(n);
      for (int64_t u = 0; u < hidden; ++u) {
        const double* at = z.data() + n * four + u;
        const double i = sigmoid(at[0]), forget = sigmoid(at[hidden]), g = std::tanh(at[2 * hidden]),
                     o = sigmoid(at[3 * hidden]);
        const auto unit = static_cast<size_t>(n * hidden + u);
        if (runs) {
          c[unit] = forget * c[unit] + i * g;
          h[unit] = o * std::tanh(c[unit]);
        }
        const int64_t out = (t * f.n + n) * hidden + u;
        store_element(f.y, out, f.dtype, runs ? h[unit] : 0);
        if (f.gates == nullptr) continue;
        store_element(f.cells, out, state, runs ? c[unit] : 0);
        const double gates[] = {i, forget, g, o};
        for (int64_t k = 0; k < kGates; ++k) {
          store_element(f.gates, (t * f.n + n) * four + k * hidden + u, f.dtype, runs ? gates[k] : 0);
        }
      }
    }
  }
  for (int64_t i = 0; i < f.n * hidden; ++i) {
    if (f.h != nullptr) store_element(f.h, i, f.dtype, h[static_cast<size_t>(i)]);
    if (f.c != nullptr) store_element(f.c, i, state, c[static_cast<size_t>(i)]);
  }
}

void reference_backward(const Backward& b) {
  const Plain p(b);
  const DType state = sum_dtype(b.dtype);
  const int64_t hidden = b.hidden, four = kGates * hidden;
  std::vector<double> dh = p.load(b.dh, 0, hidden, b.dtype), dc = p.load(b.dc, 0, hidden, state);
  std::vector<double> dw(static_cast<size_t>(b.layout.blocks * b.layout.block_size * b.layout.block_size));
  for (int64_t t = b.steps; t-- > 0;) {
    const std::vector<double> dy = p.load(b.dy, t, hidden, b.dtype), gates = p.load(b.gates, t, four, b.dtype),
                              c = p.load(b.cells, t, hidden, state),
                              before = t > 0 ? p.load(b.cells, t - 1, hidden, state) : p.load(b.c0, 0, hidden, state),
                              h = t > 0 ? p.load(b.y, t - 1, hidden, b.dtype) : p.load(b.h0, 0, hidden, b.dtype);
    std::vector<double> dz = p.matrix(four);
    for (int64_t n = 0; n < b.n; ++n) {
      if (t >= b.length(n)) continue;
      for (int64_t u = 0; u < hidden; ++u) {
        const auto unit = static_cast<size_t>(n * hidden + u);
        const double* gate = gates.data() + n * four + u;
        const double i = gate[0], f = gate[hidden], g = gate[2 * hidden], o = gate[3 * hidden];
        const double squashed = std::tanh(c[unit]), dh_all = dh[unit] + dy[unit];
        const double dc_all = dc[unit] + dh_all * o * (1 - squashed * squashed);
        double* out = dz.data() + n * four + u;
        out[0] = dc_all * g * i * (1 - i);
        out[hidden] = dc_all * before[unit] * f * (1 - f);
        out[2 * hidden] = dc_all * i * (1 - g * g);
        out[3 * hidden] = dh_all * squashed * o * (1 - o);
        dc[unit] = dc_all * f;
        dh[unit] = 0;  // the rest flows through dz W
      }
    }
    p.for_each_weight([&](int64_t row, int64_t column, int64_t at) {
      const double w = load_element(b.w, at, b.dtype);
      for (int64_t n = 0; n < b.n; ++n) {
        const double d = dz[static_cast<size_t>(n * four + row)];
        const auto unit = static_cast<size_t>(n * hidden + column);
        dh[unit] += w * d;
        dw[static_cast<size_t>(at)] += d * h[unit];
      }
    });
    for (int64_t i = 0; i < b.n * four; ++i) {
      store_element(b.dpre, t * b.n * four + i, b.dtype, dz[static_cast<size_t>(i)]);
    }
  }
  for (int64_t i = 0; i < b.n * hidden; ++i) {
    if (b.dh0 != nullptr) store_element(b.dh0, i, b.dtype, dh[static_cast<size_t>(i)]);
    if (b.dc0 != nullptr) store_element(b.dc0, i, state, dc[static_cast<size_t>(i)]);
  }
  for (size_t i = 0; b.dw != nullptr && i < dw.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    const double old = b.accumulate ? load_element(b.dw, at, b.dw_dtype) : 0;
    store_element(b.dw, at, b.dw_dtype, old + dw[i]);
  }
}

}  // namespace blocksparse::lstm
