// The cell's arithmetic for any element type and instruction set. It works on one block of units of a group of tokens,
// directly behind the products that made its sums:
//   sums [gates][vectors][b][lanes]     transposed to rows [gates][lanes][b], because memory is features-last; some
//                                       product kernels leave rows
// Who does what
//   forward_token    z = pre + sums -> gates, c, y       backward_token   dh = sums + dy -> dpre, dc
// Between load and store everything is of the type of sums.
#pragma once

#include "cpu/activation.h"
#include "cpu/pack.h"
#include "ops/lstm/cpu/kernels.h"

namespace blocksparse::lstm {
namespace {

constexpr int kGates = 4;
constexpr int kSmallestBlock = 8;  // a vector of 16 lanes does not fit into it
constexpr int kMaxBlock = 128;

template <DType D>
struct CellConfig {
  static constexpr DType dtype = D;
  using T = Element<D>;
  using S = Sum<D>;
  static constexpr int lanes = kLanes<S>;
};

// The sums of one vector of tokens, as rows.
template <class S>
struct Rows {
  const S* data;
  int64_t gate, token;  // strides
};

// W lanes are no more than a block has units.
template <class C, int W>
Rows<typename C::S> rows_of(const CellTask& k, int64_t b, int gates, int64_t offset, typename C::S* scratch) {
  using S = typename C::S;
  constexpr int L = C::lanes;
  const S* sums = static_cast<const S*>(k.sums) + offset * b;
  if (k.by_token && offset + L <= k.summed) return {sums, k.gate, b};
  const Rows<S> rows{scratch, L * b, b};
  if (offset >= k.summed) {
    __builtin_memset(scratch, 0, sizeof(S) * static_cast<size_t>(gates * L * b));
    return rows;
  }
  for (int gate = 0; gate < gates; ++gate) {
    const S* in = sums + gate * k.gate;
    S* out = scratch + gate * rows.gate;
    if (k.by_token) {
      const int64_t tokens = k.summed - offset;
      __builtin_memcpy(out, in, sizeof(S) * static_cast<size_t>(tokens * b));
      __builtin_memset(out + tokens * b, 0, sizeof(S) * static_cast<size_t>((L - tokens) * b));
      continue;
    }
    for (int64_t t = 0; t < L; t += W) {
      for (int64_t f = 0; f < b; f += W) pack_transposed<S, W>(in + f * L + t, L, W, W, out + t * b + f, b);
    }
  }
  return rows;
}

template <class T>
BS_INLINE T* at_or_null(T* data, int64_t offset) {
  return data == nullptr ? nullptr : data + offset;
}

// The row of one token in a matrix [n, columns], or null.
template <class T>
BS_INLINE const T* row_of(const void* matrix, int64_t offset) {
  return at_or_null(static_cast<const T*>(matrix), offset);
}
template <class T>
BS_INLINE T* row_of(void* matrix, int64_t offset) {
  return at_or_null(static_cast<T*>(matrix), offset);
}

template <class S, int W, class T>
BS_INLINE Vec<S, W> load_or_zero(const T* p, int64_t i) {
  return p == nullptr ? Vec<S, W>{} : load_as<S, W>(p + i);
}

template <class T>
void write_zeros(T* p, int64_t count) {
  if (p != nullptr) __builtin_memset(p, 0, sizeof(T) * static_cast<size_t>(count));
}

BS_INLINE int64_t length_of(const CellStep& s, int64_t token) {
  return s.lengths == nullptr ? s.steps : s.lengths[token];
}

template <class C, int W>
void forward_token(const ForwardStep& s, int64_t unit, int64_t token, const typename C::S* sums, int64_t gate_stride) {
  using S = typename C::S;
  using T = typename C::T;
  const int64_t hidden = s.hidden, at = token * hidden + unit, at4 = token * kGates * hidden + unit;
  T* y = static_cast<T*>(s.y) + at;
  S* c = static_cast<S*>(s.c) + at;
  T* gates = row_of<T>(s.gates, at4);
  const int64_t length = length_of(s, token);
  if (s.t >= length) {
    write_zeros(y, s.block);
    if (gates == nullptr) return;
    write_zeros(c, s.block);
    for (int gate = 0; gate < kGates; ++gate) write_zeros(gates + gate * hidden, s.block);
    return;
  }
  const T* pre = static_cast<const T*>(s.pre) + at4;
  const S* before = row_of<S>(s.c_before, at);
  const bool ends = s.t == length - 1;
  T* h_end = ends ? row_of<T>(s.h_end, at) : nullptr;
  S* c_end = ends ? row_of<S>(s.c_end, at) : nullptr;
  for (int64_t u = 0; u < s.block; u += W) {
    Vec<S, W> z[kGates];
#pragma GCC unroll 4
    for (int gate = 0; gate < kGates; ++gate) {
      z[gate] = load_as<S, W>(pre + gate * hidden + u) + load_as<S, W>(sums + gate * gate_stride + u);
    }
    const Vec<S, W> i = logistic<W>(z[0]), f = logistic<W>(z[1]), g = hyperbolic_tangent<W>(z[2]),
                    o = logistic<W>(z[3]);
    const Vec<S, W> cell = f * load_or_zero<S, W>(before, u) + i * g;
    const Vec<S, W> h = o * hyperbolic_tangent<W>(cell);
    store_as<S, W>(c + u, cell);
    store_as<S, W>(y + u, h);
    if (gates != nullptr) {
      store_as<S, W>(gates + u, i);
      store_as<S, W>(gates + hidden + u, f);
      store_as<S, W>(gates + 2 * hidden + u, g);
      store_as<S, W>(gates + 3 * hidden + u, o);
    }
    if (h_end != nullptr) store_as<S, W>(h_end + u, h);
    if (c_end != nullptr) store_as<S, W>(c_end + u, cell);
  }
}

template <class C, int W>
void backward_token(const BackwardStep& s, int64_t unit, int64_t token, const typename C::S* sums, int64_t) {
  using S = typename C::S;
  using T = typename C::T;
  const int64_t hidden = s.hidden, at = token * hidden + unit, at4 = token * kGates * hidden + unit;
  T* dpre = static_cast<T*>(s.dpre) + at4;
  const int64_t length = length_of(s, token);
  if (s.t >= length) {
    for (int gate = 0; gate < kGates; ++gate) write_zeros(dpre + gate * hidden, s.block);
    return;
  }
  const bool ends = s.t == length - 1;
  const T* gates = static_cast<const T*>(s.gates) + at4;
  const S *c = static_cast<const S*>(s.c) + at, *before = row_of<S>(s.c_before, at);
  const T *dy = row_of<T>(s.dy, at), *dh_end = ends ? row_of<T>(s.dh_end, at) : nullptr;
  S* dc = static_cast<S*>(s.dc) + at;
  const S* dc_behind = ends ? row_of<S>(s.dc_end, at) : dc;
  for (int64_t u = 0; u < s.block; u += W) {
    const Vec<S, W> i = load_as<S, W>(gates + u), f = load_as<S, W>(gates + hidden + u),
                    g = load_as<S, W>(gates + 2 * hidden + u), o = load_as<S, W>(gates + 3 * hidden + u);
    const Vec<S, W> squashed = hyperbolic_tangent<W>(load_as<S, W>(c + u));
    const Vec<S, W> dh = load_as<S, W>(sums + u) + load_or_zero<S, W>(dy, u) + load_or_zero<S, W>(dh_end, u);
    const Vec<S, W> dcell = load_or_zero<S, W>(dc_behind, u) + dh * o * (1 - squashed * squashed);
    store_as<S, W>(dpre + u, dcell * g * i * (1 - i));
    store_as<S, W>(dpre + hidden + u, dcell * load_or_zero<S, W>(before, u) * f * (1 - f));
    store_as<S, W>(dpre + 2 * hidden + u, dcell * i * (1 - g * g));
    store_as<S, W>(dpre + 3 * hidden + u, dh * squashed * o * (1 - o));
    store_as<S, W>(dc + u, dcell * f);
  }
}

// Calls body(token, its sums, stride from gate to gate) for each token of a task.
template <class C, int W, class Body>
void for_each_token(const CellTask& k, int64_t b, int gates, typename C::S* scratch, Body&& body) {
  for (int64_t first = k.first; first < k.last; first += C::lanes) {
    const auto rows = rows_of<C, W>(k, b, gates, first - k.first, scratch);
    const int64_t last = least<int64_t>(first + C::lanes, k.last);
    for (int64_t token = first; token < last; ++token) {
      body(token, rows.data + (token - first) * rows.token, rows.gate);
    }
  }
}

template <class C, int W>
void forward_by(const ForwardStep& s, const CellTask& k) {
  alignas(64) typename C::S scratch[kGates * C::lanes * kMaxBlock];
  for_each_token<C, W>(k, s.block, kGates, scratch, [&](int64_t token, const typename C::S* sums, int64_t gate) {
    forward_token<C, W>(s, k.unit, token, sums, gate);
  });
}

template <class C, int W>
void backward_by(const BackwardStep& s, const CellTask& k) {
  alignas(64) typename C::S scratch[C::lanes * kMaxBlock];
  for_each_token<C, W>(k, s.block, 1, scratch, [&](int64_t token, const typename C::S* sums, int64_t gate) {
    backward_token<C, W>(s, k.unit, token, sums, gate);
  });
}

template <class C>
void forward(const ForwardStep& s, const CellTask& k) {
  if (C::lanes > kSmallestBlock && s.block < C::lanes) forward_by<C, kSmallestBlock>(s, k);
  else forward_by<C, C::lanes>(s, k);
}

template <class C>
void backward(const BackwardStep& s, const CellTask& k) {
  if (C::lanes > kSmallestBlock && s.block < C::lanes) backward_by<C, kSmallestBlock>(s, k);
  else backward_by<C, C::lanes>(s, k);
}

template <class C>
void multiply(const Multiply& m, int64_t first, int64_t last) {
  using S = typename C::S;
  using T = typename C::T;
  constexpr int L = C::lanes;
  const T *x = static_cast<const T*>(m.x), *a = static_cast<const T*>(m.a), *b = static_cast<const T*>(m.b);
  T *of_a = static_cast<T*>(m.of_a), *of_b = static_cast<T*>(m.of_b);
  for (int64_t i = first; i < last; i += L) {
    const int64_t left = last - i;
    const Vec<S, L> of_x = load_first<S, L>(x + i, left);
    store_first<S, L>(of_a + i, of_x * load_first<S, L>(a + i, left), left);
    if (of_b != nullptr) store_first<S, L>(of_b + i, of_x * load_first<S, L>(b + i, left), left);
  }
}

template <class C>
CellKernel make_cell(Isa isa) {
  return {isa, C::dtype, forward<C>, backward<C>, multiply<C>};
}

}  // namespace
}  // namespace blocksparse::lstm
