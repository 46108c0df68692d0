// dW[block] (+)= gate * dy_out^T x_in on the CPU, and the gradient of the gates, for any element type and instruction
// set.
//   x panels [in blocks][round][b]     dy panels [out blocks][round][b]     sums in registers over a whole round
//   With pairs a row of a panel holds two tokens, and the first half of the rows is used.
// Who does what
//   pack      blocks of features of x or dy, widened to the type of sums; features-first is transposed
//   multiply  a run of blocks. Blocks of one row share dy, so their columns are treated as one list of vectors:
//               for each tile.vectors of that list:      their part of x stays in L1
//                 for each strip of tile.outputs rows:   sums over all tokens in registers
//                   merge: gate, gradient of the gate, accumulate, narrow, store
#pragma once

#include <type_traits>

#include "core/ceil_div.h"
#include "gemm/cpu/gradient_pack.h"

namespace blocksparse::gemm {
namespace {

// A run of input features inside a block: a row of blocks of dW is divided into such runs.
struct Columns {
  int64_t block;    // index of the block in W
  int64_t in;       // its block of inputs
  int64_t column;   // first column in the block
  int64_t tap = 0;  // of a convolution
};

// Loads the members one by one. GCC loads two of them as a vector, which waits some 100 cycles until both have been
// stored. Zen 5, 4096 x 4096, b = 16, 10 %, wgrad: 1.5 ms -> 1.02. Not for blocks narrower than a vector: their six
// runs a strip need 24 loads, and b = 8, 50 % takes 10.1 ms instead of 7.5.
BS_INLINE Columns alone(const Columns& columns) {
  Columns at = columns;
  asm("" : "+r"(at.block), "+r"(at.in), "+r"(at.column), "+r"(at.tap));
  return at;
}

// The offset in dW and W of [b, b] of a block, or of its tap.
inline int64_t weights_at(const GradientArgs& a, const Columns& at) {
  return (at.block * a.taps.taps + at.tap) * a.block * a.block;
}

// Merges a row of L sums into dW and returns its part of the gate's gradient.
template <class C, int L>
typename C::S merge(const GradientArgs& a, const Columns& at, int row, int64_t valid, Vec<typename C::S, L> sum) {
  using S = typename C::S;
  using T = typename C::T;
  const int64_t offset = weights_at(a, at) + row * a.block + at.column;
  S gate_sum{};
  if (a.dgates != nullptr) {
    S dot[L];
    store_as<S, L>(static_cast<S*>(dot), sum * load_first<S, L>(static_cast<const T*>(a.w) + offset, valid));
    for (int64_t i = 0; i < valid; ++i) gate_sum += dot[i];
  }
  if (a.sums != nullptr) {
    S* total = static_cast<S*>(a.sums) + offset - a.taps.first_sum * a.taps.taps * a.block * a.block;
    if (a.add_sums) sum += load_as<S, L>(total);
    if (a.keep_sums) {
      store_as<S, L>(total, sum);
      return gate_sum;
    }
  }
  if (a.gates != nullptr) {
    const S gate = static_cast<const S*>(a.gates)[at.block];
    sum = gate == S{0} ? Vec<S, L>{} : sum * gate;
  }
  auto put = [&](auto* dw) __attribute__((always_inline)) {
    if (a.accumulate) {
      store_first<S, L>(dw, load_first<S, L>(dw, valid) + sum, valid);
      return;
    }
    store_first<S, L>(dw, sum, valid);
    for (int64_t i = valid < 0 ? 0 : valid; i < L; ++i) dw[i] = {};
  };
  if (a.dw_is_wide) put(static_cast<S*>(a.dw) + offset);
  else put(static_cast<T*>(a.dw) + offset);
  return gate_sum;
}

// A vector of J runs of columns, each loaded from its own address.
template <class S, int L, int J>
BS_INLINE Vec<S, L> load_runs(const S* const* from, int64_t at) {
  if constexpr (J == 1) {
    return load_as<S, L>(from[0] + at);
  } else {
    static_assert(J == 2);
    const auto low = load_as<S, L / 2>(from[0] + at), high = load_as<S, L / 2>(from[1] + at);
    return [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
      return __builtin_shufflevector(low, high, I...);
    }(std::make_integer_sequence<int, L>());
  }
}

template <class S, int L, int J>
BS_INLINE void store_runs(S* const* to, int64_t at, Vec<S, L> sum) {
  struct Runs {
    Vec<S, L / J> run[J];
  };
  const auto runs = bits_as<Runs>(sum);
#pragma GCC unroll 2
  for (int j = 0; j < J; ++j) store_as<S, L / J>(to[j] + at, runs.run[j]);
}

// dy of a row of blocks, or of some of its rows. `token` is the distance between tokens.
template <class P>
struct DyRows {
  const P* data;
  int64_t token;
};

// The inner loop: out[i][o * row] (+)= sum over tokens of dy [tokens, O rows]^T x [tokens, V * J runs of columns].
// Not inlined: bf16, f16 and f32 share one copy.
//   kFirst  dy is features-first and read where it lies: [features][tokens]
template <class S, class P, int L, int O, int V, int J, bool kFirst>
__attribute__((noinline)) void gradient_tile(const GradientArgs& a, const DyRows<P>& dy, const P* const* x,
                                             S* const* out, int64_t row, bool add) {
  Vec<S, L> sum[O][V] = {};
  if (add) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 16
      for (int o = 0; o < O; ++o) sum[o][v] = load_runs<S, L, J>(out + v * J, o * row);
    }
  }
  const int64_t x_token = a.direct ? a.x_token : a.block, dy_token = dy.token;
  const TokenRun all{0, 0, ceil_div(a.n, kTogether<P>)};
  const TokenRun* run = a.taps.runs == nullptr ? &all : a.taps.runs;
  const TokenRun* end = run + (a.taps.runs == nullptr ? 1 : a.taps.run_count);
  for (; run != end; ++run) {
    const P *xr[V * J], *dyr = dy.data + run->dy * dy_token;
    constexpr int kBases = ceil_div(O, 4);  // a base address for every fourth feature
    const P* rows[kBases];
#pragma GCC unroll 4
    for (int r = 0; kFirst && r < kBases; ++r) rows[r] = dy.data + run->dy + 4 * r * a.dy_feature;
#pragma GCC unroll 16
    for (int i = 0; i < V * J; ++i) xr[i] = x[i] + run->x * x_token;
    for (int64_t t = 0; t < run->tokens; ++t) {
      Vec<P, L> xv[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) xv[v] = load_runs<P, L, J>(xr + v * J, t * x_token);
#pragma GCC unroll 16
      for (int o = 0; o < O; ++o) {
        const P* at = kFirst ? rows[o / 4] + o % 4 * a.dy_feature : dyr + t * dy_token + o;
        const Vec<P, L> d = broadcast<P, L>(*at);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) sum[o][v] = multiply_add<S, L>(sum[o][v], d, xv[v]);
      }
#pragma GCC unroll 4
      for (int r = 0; kFirst && r < kBases; ++r) rows[r] = next_row(rows[r] + 1);
    }
  }
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) {
#pragma GCC unroll 16
    for (int o = 0; o < O; ++o) store_runs<S, L, J>(out + v * J, o * row, sum[o][v]);
  }
}

// Whether sums may be stored or added as they are: no gate scales them and no edge cuts them.
template <class C, int L>
bool is_plain(const GradientArgs& a, int64_t out, const Columns* columns, int count) {
  if (a.gates != nullptr || a.dgates != nullptr || a.sums != nullptr) return false;
  bool whole = (out + 1) * a.block <= a.out_features;
  for (int v = 0; v < count; ++v) {
    const Columns at = L == C::lanes ? alone(columns[v]) : columns[v];
    whole = whole && at.in * a.block + at.column + L <= a.in_features;
  }
  return whole;
}

// Brings O rows of sums of `count` runs of columns to their blocks. A run is [row][L]; runs are `apart` from one
// another.
template <class C, int L, int O>
void store_sums(const GradientArgs& a, int64_t out, const Columns* columns, int count, int64_t row, bool plain,
                const typename C::S* sums, int64_t apart, typename C::S* gate_sums) {
  using S = typename C::S;
  const int64_t rows = least<int64_t>(O, a.out_features - out * a.block - row);
  for (int v = 0; v < count; ++v, sums += apart) {
    if (plain && C::narrow && !a.dw_is_wide && !a.accumulate) {
      const int64_t offset = weights_at(a, columns[v]) + row * a.block + columns[v].column;
      auto* dw = static_cast<typename C::T*>(a.dw) + offset;
      for (int o = 0; o < O; ++o) store_as<S, L>(dw + o * a.block, load_as<S, L>(sums + o * L));
      continue;
    }
    const int64_t valid = least<int64_t>(L, a.in_features - columns[v].in * a.block - columns[v].column);
    for (int o = 0; o < O; ++o) {
      const auto sum = load_as<S, L>(sums + o * L);
      gate_sums[v] += merge<C, L>(a, columns[v], static_cast<int>(row) + o, o < rows ? valid : 0, sum);
    }
  }
}

template <class C, int L, int O, int V, int J>
BS_INLINE void gradient_strip(const GradientArgs& a, const DyRows<typename C::P>& dy, int row,
                              const typename C::P* const* x, typename C::S* const* out, int64_t out_row, bool add) {
  using S = typename C::S;
  using P = typename C::P;
  if constexpr (std::is_same_v<P, typename C::T>) {
    if (a.dy_feature != 1) {
      const DyRows<P> some{dy.data + row * a.dy_feature, dy.token};
      return gradient_tile<S, P, L, O, V, J, true>(a, some, x, out, out_row, add);
    }
  }
  gradient_tile<S, P, L, O, V, J, false>(a, DyRows<P>{dy.data + row, dy.token}, x, out, out_row, add);
}

// All rows of V * J runs of columns of one output block.
template <class C, int L, int O, int V, int J>
void gradient_strips(const GradientArgs& a, int64_t out, const Columns* columns, const DyRows<typename C::P>& dy) {
  using S = typename C::S;
  using P = typename C::P;
  constexpr int kRuns = V * J, W = L / J;
  const int64_t in_block = a.direct ? a.block : a.round * a.block;
  const P* x[kRuns];
  S* to[kRuns];
  for (int i = 0; i < kRuns; ++i) {
    const int64_t shift = a.taps.x_shift == nullptr ? 0 : a.taps.x_shift[columns[i].tap];
    const Columns at = J == 1 ? alone(columns[i]) : columns[i];
    x[i] = static_cast<const P*>(a.x_panels) + at.in * in_block + shift * a.block + at.column;
    to[i] = static_cast<S*>(a.dw) + weights_at(a, at) + at.column;
  }
  const bool plain = is_plain<C, W>(a, out, columns, kRuns);
  const bool stored = plain && (!C::narrow || a.dw_is_wide);
  // Two vectors leave registers for 12 rows: fewer tiles, and x that is not in L1 is read fewer times.
  constexpr int kTall = kVectorBytes == 64 && V == 2 && O == 8 ? 12 : O;
  alignas(64) S sums[V * kTall * L];
  S gate_sums[kRuns] = {};
  for (int i = 0; i < kRuns && !stored; ++i) to[i] = sums + i * kTall * W;
  const auto strip = [&]<int R>(int row) __attribute__((always_inline)) {
    if (!stored) {
      gradient_strip<C, L, R, V, J>(a, dy, row, x, to, W, false);
      store_sums<C, W, R>(a, out, columns, kRuns, row, plain, sums, kTall * W, gate_sums);
      return;
    }
    gradient_strip<C, L, R, V, J>(a, dy, row, x, to, a.block, a.accumulate);
    for (int i = 0; i < kRuns; ++i) to[i] += R * a.block;
  };
  for (int row = 0; row < a.block;) {
    const int left = a.block - row;
    if (kTall > O && left >= kTall && left != 2 * O) {
      strip.template operator()<kTall>(row);
      row += kTall;
    } else {
      strip.template operator()<O>(row);
      row += O;
    }
  }
  if (a.dgates == nullptr) return;
  for (int i = 0; i < kRuns; ++i) static_cast<S*>(a.dgates)[columns[i].block] += gate_sums[i];
}

// dy of a row of blocks, in place or copied. Rows of dy are often a power of two apart, so that those of 64 tokens lie
// in few sets of L1.
template <class C>
DyRows<typename C::P> dy_of(const GradientArgs& a, int64_t out, typename C::P* copy) {
  using P = typename C::P;
  constexpr int kRun = C::lanes < 8 ? C::lanes : 8;  // divides every block size
  const int64_t out_block = a.dy_direct ? a.block * a.dy_feature : a.dy_round * a.block;
  const P* dy = static_cast<const P*>(a.dy_panels) + out * out_block + a.taps.dy_shift * a.block;
  const int64_t token = a.dy_direct ? a.dy_token : a.block;
  if (!a.copies_dy) return {dy, token};
  for (int64_t t = 0; t < a.n; ++t) {
    for (int64_t f = 0; f < a.block; f += kRun) {
      store_as<P, kRun>(copy + t * a.block + f, load_as<P, kRun>(dy + t * token + f));
    }
  }
  return {copy, a.block};
}

// One row of blocks. A vector holds J runs of columns: of several blocks if a block is narrower than a vector.
template <class C, int L, int J>
void gradient_row(const GradientArgs& a, int64_t out, int64_t first_block, int64_t last_block) {
  constexpr int O = C::tile.outputs, V = C::tile.vectors, W = L / J;
  constexpr int kAlone = O < 8 ? 8 : O;  // a single vector needs more rows to keep the FMA units busy
  alignas(64) typename C::P copy[kInPlaceTokens * kMaxBlock];
  const DyRows<typename C::P> dy = dy_of<C>(a, out, copy);
  Columns next{first_block, 0, 0, a.taps.first}, columns[V * J];
  const int64_t units = (last_block - first_block) * (a.taps.last - a.taps.first);
  for (int64_t left = units * (a.block / W); left > 0;) {
    const int64_t whole = left / J;
    const int vectors = static_cast<int>(V >= 3 && whole == 4 ? 2 : least<int64_t>(V, whole));
    const int take = vectors == 0 ? 1 : vectors * J;
    for (int i = 0; i < take; ++i) {
      next.in = a.refs[next.block].from;
      columns[i] = next;
      next.column += W;
      if (next.column < a.block) continue;
      next.column = 0;
      if (++next.tap < a.taps.last) continue;
      next = {next.block + 1, 0, 0, a.taps.first};
    }
    left -= take;
    if constexpr (V >= 3) {
      if (vectors == 3) {
        gradient_strips<C, L, O, 3, J>(a, out, columns, dy);
        continue;
      }
    }
    if (vectors == 2) gradient_strips<C, L, O, 2, J>(a, out, columns, dy);
    else if (vectors == 1) gradient_strips<C, L, kAlone, 1, J>(a, out, columns, dy);
    else gradient_strips<C, W, kAlone, 1, 1>(a, out, columns, dy);
  }
}

// A closed gate whose own gradient is not wanted: dW is 0, whatever x and dy hold.
template <class C>
BS_INLINE bool is_skipped(const GradientArgs& a, int64_t block) {
  return a.gates != nullptr && a.dgates == nullptr && static_cast<const typename C::S*>(a.gates)[block] == 0;
}

template <class C>
void write_zeros(const GradientArgs& a, int64_t block) {
  if (a.accumulate || a.keep_sums) return;
  const int64_t size = (a.taps.last - a.taps.first) * a.block * a.block;
  const size_t bytes = a.dw_is_wide ? sizeof(typename C::S) : sizeof(typename C::T);
  const int64_t at = weights_at(a, {block, 0, 0, a.taps.first});
  __builtin_memset(static_cast<char*>(a.dw) + at * static_cast<int64_t>(bytes), 0, static_cast<size_t>(size) * bytes);
}

// Calls row(out, first, last) for the blocks [first, last) of each row.
template <class C, class Row>
void gradient_rows(const GradientArgs& a, int64_t first_block, int64_t last_block, Row row) {
  using S = typename C::S;
  if (a.dgates != nullptr && !a.accumulate_gates) {
    for (int64_t i = first_block; i < last_block; ++i) static_cast<S*>(a.dgates)[i] = S{0};
  }
  for (int64_t i = first_block; i < last_block;) {
    if (is_skipped<C>(a, i)) {
      write_zeros<C>(a, i++);
      continue;
    }
    const int64_t out = a.out_of[i];
    // Ragged columns are merged, whole ones stored. They are kept apart: otherwise tiles, and so the bits, would depend
    // on where a task begins.
    const auto ragged = [&](int64_t block) { return (a.refs[block].from + 1) * int64_t{a.block} > a.in_features; };
    int64_t end = i + 1;
    while (end < last_block && a.out_of[end] == out && ragged(end) == ragged(i) && !is_skipped<C>(a, end)) ++end;
    row(out, i, end);
    i = end;
  }
}

template <class C>
void gradient(const GradientArgs& a, int64_t first_block, int64_t last_block) {
  constexpr int L = C::lanes;
  gradient_rows<C>(a, first_block, last_block, [&](int64_t out, int64_t first, int64_t last) {
    if constexpr (L > 8) {  // a vector of 16 does not fit into a block of 8
      if (a.block < L) return gradient_row<C, 16, 2>(a, out, first, last);
    }
    gradient_row<C, L, 1>(a, out, first, last);
  });
}

template <class C>
GradientKernel make_gradient(Isa isa) {
  return {isa, C::dtype, C::tile, C::lanes, pack_for_gradient<C>, gradient<C>};
}

}  // namespace
}  // namespace blocksparse::gemm
