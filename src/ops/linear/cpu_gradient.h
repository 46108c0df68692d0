// dW[block] (+)= gate * dy_out^T x_in on the CPU, and the gradient of the gates, for any element type and instruction
// set.
//   x panels [in blocks][round][b]     dy panels [out blocks][round][b]     sums in registers over a whole round
//   Panels of pairs hold two tokens in a row: the first half of their rows is used.
// Who does what
//   pack      blocks of features of x or dy, widened to the type of sums; features-first is transposed
//   multiply  a run of blocks. Blocks of one row share dy, so their columns are treated as one list of vectors:
//               for each tile.vectors of that list:      their part of x stays in L1
//                 for each strip of tile.outputs rows:   sums over all tokens in registers
//                   merge: gate, gradient of the gate, accumulate, narrow, store
#pragma once

#include "cpu/pack.h"
#include "ops/linear/kernels.h"

namespace blocksparse::linear {
namespace {

template <DType D, Tile kTile, class Panel = Sum<D>>
struct GradientConfig {
  static constexpr DType dtype = D;
  using T = Element<D>;
  using S = Sum<D>;
  using P = Panel;
  static constexpr Tile tile = kTile;
  static constexpr int lanes = kLanes<S>;
  static constexpr bool narrow = sizeof(T) < sizeof(S);
};

// A run of input features inside a block: the unit in which a row of dW is divided.
struct Columns {
  int64_t block;    // of weights
  int64_t in;       // block of inputs
  int64_t column;   // first column in the block
  int64_t tap = 0;  // of a convolution
};

// Features-last: a few tokens of every block in turn. Rows of x are often a power of two apart, so whole columns of it
// fight for one set of L1 (64 tokens of width 1024, a block at a time: twice as slow).
template <class C>
void pack_rows(const RowsToPack& p, int64_t first_block, int64_t last_block) {
  using S = typename C::S;
  constexpr int kRun = C::lanes < 8 ? C::lanes : 8;  // divides every block size
  constexpr int64_t kTokens = 4;
  for (int64_t first = 0; first < p.tokens; first += kTokens) {
    const int64_t last = least(first + kTokens, p.tokens);
    for (int64_t block = first_block; block < last_block; ++block) {
      const int64_t features = least<int64_t>(p.block, p.features - block * p.block);
      const auto* from = static_cast<const typename C::T*>(p.source) + block * p.block;
      S* panel = static_cast<S*>(p.panels) + (block * p.round + p.first_token) * p.block;
      for (int64_t t = first; t < last; ++t) {
        pack_run<S, kRun>(from + t * p.token_stride, features, p.block, panel + t * p.block);
      }
    }
  }
}

// Features-first.
template <class C>
void pack_columns(const RowsToPack& p, int64_t block) {
  using S = typename C::S;
  constexpr int kSquare = C::lanes < 8 ? C::lanes : 8;
  const int64_t feature = block * p.block, features = least<int64_t>(p.block, p.features - feature);
  const auto* from = static_cast<const typename C::T*>(p.source) + feature * p.feature_stride;
  S* panel = static_cast<S*>(p.panels) + (block * p.round + p.first_token) * p.block;
  for (int64_t f = 0; f < p.block; f += kSquare) {
    const int64_t rows = least<int64_t>(kSquare, features - f);
    pack_transposed<S, kSquare>(from + f * p.feature_stride, p.feature_stride, rows, p.tokens, panel + f, p.block);
  }
}

// A row of a panel of pairs: both tokens, or the first and zeros, or (first null) the second beside what is there.
template <int Q>
BS_INLINE void put_pair_row(const BFloat16* first, const BFloat16* second, int64_t features, int64_t block,
                            BFloat16Pair* to) {
  if (first != nullptr && second != nullptr && features == block) {
    for (int64_t f = 0; f < block; f += Q) store_pairs<Q>(to + f, pair_rows<Q>(first + f, second + f));
    return;
  }
  for (int64_t f = 0; f < block; ++f) {
    const bool exists = f < features;
    if (first != nullptr) to[f].first = exists ? first[f].bits : uint16_t{0};
    to[f].second = exists && second != nullptr ? second[f].bits : uint16_t{0};
  }
}

// Features in an order of the caller's, or neither features nor tokens side by side.
template <class C>
void pack_in_order(const RowsToPack& p, int64_t block) {
  using S = typename C::S;
  const int64_t feature = block * p.block, features = least<int64_t>(p.block, p.features - feature);
  const auto* from = static_cast<const typename C::T*>(p.source);
  S* panel = static_cast<S*>(p.panels) + (block * p.round + p.first_token) * p.block;
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t f = 0; f < p.block; ++f) {
      S& to = panel[t * p.block + f];
      const int64_t source = p.order == nullptr || f >= features ? feature + f : p.order[feature + f];
      to = f < features ? load_as<S, 1>(from + t * p.token_stride + source * p.feature_stride)[0] : S{};
    }
  }
}

// Features-last; as pack_rows, a few tokens of every block in turn.
inline void pack_pair_rows(const RowsToPack& p, int64_t first_block, int64_t last_block) {
  constexpr int64_t kTokens = 4;
  const int64_t end = p.first_token + p.tokens;
  for (int64_t first = p.first_token; first < end;) {
    const int64_t last = least(first / kTokens * kTokens + kTokens, end);
    for (int64_t block = first_block; block < last_block; ++block) {
      const int64_t features = least<int64_t>(p.block, p.features - block * p.block);
      const auto* from = static_cast<const BFloat16*>(p.source) + block * p.block;
      auto* panel = static_cast<BFloat16Pair*>(p.panels) + block * p.round * p.block;
      auto row = [&](int64_t t) {
        return t < p.first_token || t >= end ? nullptr : from + (t - p.first_token) * p.token_stride;
      };
      for (int64_t t = first / 2 * 2; t < last; t += 2) {
        BFloat16Pair* to = panel + t / 2 * p.block;
        if (p.block >= 16) put_pair_row<16>(row(t), row(t + 1), features, p.block, to);
        else put_pair_row<8>(row(t), row(t + 1), features, p.block, to);
      }
    }
    first = last;
  }
}

// Features-first. What remains beside whole squares is packed one by one.
inline void pack_pair_columns(const RowsToPack& p, int64_t block) {
  constexpr int Q = 8;  // features, and pairs of tokens
  const int64_t features = least<int64_t>(p.block, p.features - block * p.block);
  const auto* from = static_cast<const BFloat16*>(p.source) + block * p.block * p.feature_stride;
  auto* panel = static_cast<BFloat16Pair*>(p.panels) + block * p.round * p.block;
  const int64_t whole_features = features / Q * Q;
  const int64_t whole_tokens = p.first_token % 2 == 0 ? p.tokens / (2 * Q) * (2 * Q) : 0;
  for (int64_t f = 0; f < whole_features; f += Q) {
    for (int64_t t = 0; t < whole_tokens; t += 2 * Q) {
      transpose_pairs<Q>([&](int r) { return load_pairs<Q>(from + (f + r) * p.feature_stride + t); },
                         panel + (p.first_token + t) / 2 * p.block + f, p.block);
    }
  }
  for (int64_t f = 0; f < p.block; ++f) {
    for (int64_t t = f < whole_features ? whole_tokens : 0; t < p.tokens; ++t) {
      BFloat16Pair& pair = panel[(p.first_token + t) / 2 * p.block + f];
      const uint16_t bits = f < features ? from[f * p.feature_stride + t].bits : uint16_t{0};
      if ((p.first_token + t) % 2 == 0) pair = {bits, 0};
      else pair.second = bits;
    }
  }
}

constexpr int64_t kPairsAtOnce = 16;  // that a tile holds

inline void pack_pairs_for_gradient(const RowsToPack& p, int64_t first_block, int64_t last_block) {
  if (p.feature_stride == 1) pack_pair_rows(p, first_block, last_block);
  for (int64_t block = first_block; block < last_block; ++block) {
    if (p.feature_stride != 1) pack_pair_columns(p, block);
    if (!p.last) continue;
    const int64_t pairs = (p.first_token + p.tokens + 1) / 2, extra = -pairs & (kPairsAtOnce - 1);
    auto* rest = static_cast<BFloat16Pair*>(p.panels) + (block * p.round + pairs) * p.block;
    __builtin_memset(rest, 0, sizeof(BFloat16Pair) * static_cast<size_t>(extra * p.block));
  }
}

template <class C>
void pack_for_gradient(const RowsToPack& p, int64_t first_block, int64_t last_block) {
  if constexpr (kTogether<typename C::P> == 2) {
    pack_pairs_for_gradient(p, first_block, last_block);
  } else if (p.order != nullptr || (p.feature_stride != 1 && p.token_stride != 1)) {
    for (int64_t block = first_block; block < last_block; ++block) pack_in_order<C>(p, block);
  } else if (p.feature_stride == 1) {
    pack_rows<C>(p, first_block, last_block);
  } else {
    for (int64_t block = first_block; block < last_block; ++block) pack_columns<C>(p, block);
  }
}

// Puts a row of sums of L columns into dW, and returns its part of the gate's gradient.
// Where [b, b] of a block, or of its tap, begins in dW and W.
inline int64_t weights_at(const GradientArgs& a, const Columns& at) {
  return (at.block * a.taps.taps + at.tap) * a.block * a.block;
}

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

// The inner loop: out[v][o * row] (+)= sum over tokens of dy [tokens, O rows]^T x [tokens, V runs of columns].
// Not inlined: bf16, f16 and f32 share one copy.
template <class S, class P, int L, int O, int V>
__attribute__((noinline)) void gradient_tile(const GradientArgs& a, const P* dy, const P* const* x, S* const* out,
                                             int64_t row, bool add) {
  Vec<S, L> sum[O][V] = {};
  if (add) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 16
      for (int o = 0; o < O; ++o) sum[o][v] = load_as<S, L>(out[v] + o * row);
    }
  }
  const TokenRun all{0, 0, (a.n + kTogether<P> - 1) / kTogether<P>};
  const TokenRun* run = a.taps.runs == nullptr ? &all : a.taps.runs;
  const TokenRun* end = run + (a.taps.runs == nullptr ? 1 : a.taps.run_count);
  for (; run != end; ++run) {
    const P *xr[V], *dyr = dy + run->dy * a.block;
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) xr[v] = x[v] + run->x * a.block;
    for (int64_t t = 0; t < run->tokens; ++t) {
      Vec<P, L> xv[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) xv[v] = load_as<P, L>(xr[v] + t * a.block);
#pragma GCC unroll 16
      for (int o = 0; o < O; ++o) {
        const Vec<P, L> d = broadcast<P, L>(dyr[t * a.block + o]);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) sum[o][v] = multiply_add<S, L>(sum[o][v], d, xv[v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) {
#pragma GCC unroll 16
    for (int o = 0; o < O; ++o) store_as<S, L>(out[v] + o * row, sum[o][v]);
  }
}

// Whether sums may be stored, or added, as they come: nothing scales or cuts them.
template <class C, int L>
bool is_plain(const GradientArgs& a, int64_t out, const Columns* columns, int count) {
  if (a.gates != nullptr || a.dgates != nullptr || a.sums != nullptr) return false;
  bool whole = (out + 1) * a.block <= a.out_features;
  for (int v = 0; v < count; ++v) whole = whole && columns[v].in * a.block + columns[v].column + L <= a.in_features;
  return whole;
}

// O rows of sums of `count` runs of columns, [run][row][L], into their blocks.
template <class C, int L, int O>
void store_sums(const GradientArgs& a, int64_t out, const Columns* columns, int count, int64_t row, bool plain,
                const typename C::S* sums, typename C::S* gate_sums) {
  using S = typename C::S;
  const int64_t rows = least<int64_t>(O, a.out_features - out * a.block - row);
  for (int v = 0; v < count; ++v, sums += O * L) {
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

// All rows of V runs of columns of one output block.
template <class C, int L, int O, int V>
void gradient_strips(const GradientArgs& a, int64_t out, const Columns* columns) {
  using S = typename C::S;
  using P = typename C::P;
  const P* dy = static_cast<const P*>(a.dy_panels) + (out * a.dy_round + a.taps.dy_shift) * a.block;
  const P* x[V];
  S* to[V];
  for (int v = 0; v < V; ++v) {
    const int64_t shift = a.taps.x_shift == nullptr ? 0 : a.taps.x_shift[columns[v].tap];
    x[v] = static_cast<const P*>(a.x_panels) + (columns[v].in * a.round + shift) * a.block + columns[v].column;
    to[v] = static_cast<S*>(a.dw) + weights_at(a, columns[v]) + columns[v].column;
  }
  const bool plain = is_plain<C, L>(a, out, columns, V);
  if (plain && (!C::narrow || a.dw_is_wide)) {
    for (int row = 0; row < a.block; row += O) {
      gradient_tile<S, P, L, O, V>(a, dy + row, x, to, a.block, a.accumulate);
      for (int v = 0; v < V; ++v) to[v] += O * a.block;
    }
    return;
  }
  alignas(64) S sums[V * O * L];
  for (int v = 0; v < V; ++v) to[v] = sums + v * O * L;
  S gate_sums[V] = {};
  for (int row = 0; row < a.block; row += O) {
    gradient_tile<S, P, L, O, V>(a, dy + row, x, to, L, false);
    store_sums<C, L, O>(a, out, columns, V, row, plain, sums, gate_sums);
  }
  if (a.dgates == nullptr) return;
  for (int v = 0; v < V; ++v) static_cast<S*>(a.dgates)[columns[v].block] += gate_sums[v];
}

template <class C, int L>
void gradient_row(const GradientArgs& a, int64_t out, int64_t first_block, int64_t last_block) {
  constexpr int O = C::tile.outputs, V = C::tile.vectors;
  constexpr int kAlone = O < 8 ? 8 : O;  // a single vector needs more rows to keep the FMA units busy
  Columns next{first_block, 0, 0, a.taps.first}, columns[V];
  const int64_t units = (last_block - first_block) * (a.taps.last - a.taps.first);
  for (int64_t left = units * (a.block / L); left > 0;) {
    const int take = static_cast<int>(V >= 3 && left == 4 ? 2 : least<int64_t>(V, left));
    for (int v = 0; v < take; ++v) {
      next.in = a.refs[next.block].from;
      columns[v] = next;
      next.column += L;
      if (next.column < a.block) continue;
      next.column = 0;
      if (++next.tap < a.taps.last) continue;
      next = {next.block + 1, 0, 0, a.taps.first};
    }
    if (V >= 3 && take == 3) gradient_strips<C, L, O, 3>(a, out, columns);
    else if (take == 2) gradient_strips<C, L, O, 2>(a, out, columns);
    else gradient_strips<C, L, kAlone, 1>(a, out, columns);
    left -= take;
  }
}

// A closed gate whose own gradient nobody wants: dW is 0, whatever x and dy hold.
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

// row(out, first, last) does blocks [first, last) of one row.
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
    int64_t end = i + 1;
    while (end < last_block && a.out_of[end] == out && !is_skipped<C>(a, end)) ++end;
    row(out, i, end);
    i = end;
  }
}

template <class C>
void gradient(const GradientArgs& a, int64_t first_block, int64_t last_block) {
  constexpr int L = C::lanes;
  gradient_rows<C>(a, first_block, last_block, [&](int64_t out, int64_t first, int64_t last) {
    if constexpr (L > 8) {  // a vector of 16 does not fit into a block of 8
      if (a.block < L) return gradient_row<C, 8>(a, out, first, last);
    }
    gradient_row<C, L>(a, out, first, last);
  });
}

template <class C>
GradientKernel make_gradient(Isa isa) {
  return {isa, C::dtype, C::tile, C::lanes, pack_for_gradient<C>, gradient<C>};
}

}  // namespace
}  // namespace blocksparse::linear
