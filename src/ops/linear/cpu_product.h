// y = f(x W^T + bias + residual) on the CPU, for any element type and instruction set: fprop, and dgrad as fprop on the
// transposed layout.
//   x panels [vectors][inputs][lanes]     w [blocks, b, b]     sums [vectors][b][lanes], in registers and L1
//   Panels of pairs hold two inputs in a lane, and inputs below are then pairs of them.
// Who does what
//   pack      one vector of tokens of x, transposed if need be, widened to the type of sums
//   multiply  one piece (an output block and its list of blocks) for a group of tokens
//               for each chunk of the list (its rows of x stay in L1 or L2)
//                 for each strip of tile.outputs rows of W:      but for plain f32: the strip is copied, widened
//                   for each tile of tile.vectors of tokens:     sums stay in registers over the chunk
//             then finish: bias, residual, activation, store; a slice of a split row stores its sums instead
//   combine   adds the sums of slices in their fixed order, then finishes
#pragma once

#include <type_traits>

#include "ops/linear/cpu_ahead.h"
#include "ops/linear/cpu_few.h"
#include "ops/linear/cpu_finish.h"
#include "ops/linear/cpu_weights.h"

namespace blocksparse::linear {
namespace {

// x of some vectors: [inputs][lanes] each, rows `feature` apart; vector v begins at data + at[v].
template <class P>
struct XView {
  const P* data;
  int64_t feature;
  const int64_t* at;
};

// One block of W and the rows of x that it meets.
struct Entry {
  int64_t x;       // offset of the first row
  int64_t weight;  // which block of W
  int32_t depth;   // rows
  int32_t gate;    // which gate
};

struct Entries {
  const Entry* data;
  int count;
  const char* const* ahead = nullptr;  // null, or a part of W to be asked for at each kUnroll inputs
};

// The inner loop: sums [V][b][lanes] (+)= W strip [O, inputs of the entries] x [inputs of the entries, V vectors].
// Not inlined: bf16, f16 and f32 share one copy, which halves the time to compile.
template <class S, class P, int L, int O, int V, class WView>
__attribute__((noinline)) void multiply_tile(const ProductArgs& a, const Entries& entries, const WView& w,
                                             const XView<P>& x, S* sums, bool first) {
  int64_t at[V];
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) at[v] = x.at[v];
  Vec<S, L> sum[O][V];
#pragma GCC unroll 16
  for (int o = 0; o < O; ++o) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      sum[o][v] = first ? Vec<S, L>{} : load_as<S, L>(sums + (static_cast<int64_t>(v) * a.block + o) * L);
    }
  }
  constexpr int kPart = kUnroll * O * static_cast<int>(sizeof(P)) / kTogether<P>;
  const char* const* ahead = entries.ahead;
  for (int i = 0; i < entries.count; ++i) {
    const P* xb = x.data + entries.data[i].x;
    const P* wb = w.block(entries.data[i].weight, i);
    auto step = [&]() __attribute__((always_inline)) {
      Vec<P, L> xv[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) xv[v] = in_register(load_as<P, L>(xb + at[v]));
      xb = next_row(xb + x.feature);
#pragma GCC unroll 16
      for (int o = 0; o < O; ++o) {
        const Vec<P, L> wv = in_register(broadcast<P, L>(wb[o * WView::kOutput]));
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) sum[o][v] = multiply_add<S, L>(sum[o][v], wv, xv[v]);
      }
      wb = next_row(wb + w.input());
    };
    const int depth = entries.data[i].depth;
    constexpr int kSteps = kUnroll / kTogether<P>;
    int k = 0;
    for (; k + kSteps <= depth; k += kSteps) {
      if (kAsksInLoop && ahead != nullptr) {
        const char* part = *ahead++;
#pragma GCC unroll 8
        for (int byte = 0; byte < kPart; byte += kLine) __builtin_prefetch(part + byte);
      }
#pragma GCC unroll 8
      for (int u = 0; u < kSteps; ++u) step();
    }
    for (; k < depth; ++k) step();
  }
#pragma GCC unroll 16
  for (int o = 0; o < O; ++o) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) store_as<S, L>(sums + (static_cast<int64_t>(v) * a.block + o) * L, sum[o][v]);
  }
}

// All vectors of a group, in tiles of C::tile.vectors and fewer: never a single one next to a full tile, which would
// leave the FMA units idle between dependent sums.
template <class C, int O, class WView>
void multiply_vectors(const ProductArgs& a, Entries entries, const WView& w, const XView<typename C::P>& x, int vectors,
                      typename C::S* sums, bool first) {
  using P = typename C::P;
  constexpr int L = C::lanes;
  for (int v = 0; v < vectors;) {
    const int left = vectors - v;
    const XView<P> xv{x.data, x.feature, x.at + v};
    typename C::S* s = sums + static_cast<int64_t>(v) * a.block * L;
    if (C::tile.vectors >= 3 && left >= 3 && left != 4) {
      multiply_tile<typename C::S, P, L, O, 3>(a, entries, w, xv, s, first);
      v += 3;
    } else if (left >= 2) {
      multiply_tile<typename C::S, P, L, O, 2>(a, entries, w, xv, s, first);
      v += 2;
    } else {
      multiply_tile<typename C::S, P, L, O, 1>(a, entries, w, xv, s, first);
      v += 1;
    }
    entries.ahead = nullptr;
  }
}

// One strip of some entries with W where it lies.
template <class C>
void multiply_in_place(const ProductArgs& a, const Entries& entries, int strip, const XView<typename C::P>& x,
                       int vectors, typename C::S* sums, bool first) {
  using P = typename C::P;
  constexpr int O = C::tile.outputs;
  const auto* w = static_cast<const P*>(a.w);
  auto multiply = [&](const auto& view) { multiply_vectors<C, O>(a, entries, view, x, vectors, sums, first); };
  if constexpr (kTogether<P> == 1) {
    if (a.by_in) return multiply(ColumnsOfW<P>{w, strip, a.block});
  }
  switch (a.block) {
    case 8: return multiply(RowsOfW<P, 8>{w, strip});
    case 16: return multiply(RowsOfW<P, 16>{w, strip});
    case 32: return multiply(RowsOfW<P, 32>{w, strip});
    case 64: return multiply(RowsOfW<P, 64>{w, strip});
    default: return multiply(RowsOfW<P, 128>{w, strip});
  }
}

// All strips of some entries: sums [vectors][b][lanes] (+)= W x. before(strip) is called first; where W is copied,
// copy(i, strip, to) copies entry i. The entries have kDepth inputs together at most.
template <class C, int kDepth, class Before, class Copy>
void multiply_entries(const ProductArgs& a, const Entries& list, const XView<typename C::P>& x, int vectors,
                      typename C::S* sums, bool first, Before before, Copy copy) {
  using P = typename C::P;
  constexpr int O = C::tile.outputs, L = C::lanes;
  const int depth = a.block / kTogether<P>;
  for (int strip = 0; strip < a.block; strip += O) {
    typename C::S* s = sums + strip * L;
    const Entries entries{list.data, list.count, before(strip)};
    if (copies<C>(a)) {
      alignas(64) P strips[kDepth / kTogether<P> * O];
      for (int i = 0; i < entries.count; ++i) copy(i, strip, strips + i * depth * O);
      multiply_vectors<C, O>(a, entries, CopyOfW<P, O>{strips, depth}, x, vectors, s, first);
    } else if constexpr (C::dtype == DType::f32 || kTogether<P> == 2) {
      multiply_in_place<C>(a, entries, strip, x, vectors, s, first);
    }
  }
}

template <class C>
void multiply_chunk(const ProductArgs& a, const Chunk& chunk, Ahead<C>& ahead, const XView<typename C::P>& x,
                    int vectors, typename C::S* sums, bool first) {
  using P = typename C::P;
  constexpr int T = kTogether<P>;
  Entry entries[C::chunk_inputs / kSmallestBlock];
  const int64_t block = a.block / T, inputs = (a.inputs + T - 1) / T;
  for (int i = 0; i < chunk.count; ++i) {
    const int64_t begin = chunk.refs[i].from * block;
    const auto depth = static_cast<int32_t>(least(block, inputs - begin));
    entries[i] = {begin * x.feature, chunk.refs[i].weight, depth, chunk.refs[i].weight};
  }
  multiply_entries<C, kMaxBlock>(
      a, {entries, chunk.count}, x, vectors, sums, first, [&](int strip) { return ahead.before(a, chunk, strip); },
      [&](int i, int strip, P* to)
          __attribute__((always_inline)) { copy_strip<C, C::tile.outputs>(a, chunk.refs[i], strip, to); });
}

template <class C>
typename C::S* partial_of(const ProductArgs& a, int64_t slot, int64_t vector) {
  const int64_t vectors = (a.n + C::lanes - 1) / C::lanes;
  return static_cast<typename C::S*>(a.partial) + (slot * vectors + vector) * a.block * C::lanes;
}

// sums (+)= scale * part
template <class S, int L>
void add_scaled(S* sums, const S* part, int64_t count, S scale, bool first) {
  for (int64_t i = 0; i < count; i += L) {
    const Vec<S, L> scaled = load_as<S, L>(part + i) * scale;
    store_as<S, L>(sums + i, first ? scaled : load_as<S, L>(sums + i) + scaled);
  }
}

// sums [vectors][b][lanes] of a group, or [vectors][lanes][b]. multiply(chunk, sums, first) does a chunk. Gates
// scale W where it is copied in the type of sums; to scale pairs would round them, so their sums are scaled instead.
template <class C, class Multiply>
void sum_chunks(const ProductArgs& a, const Piece& piece, int64_t begin, int vectors, typename C::S* sums,
                Multiply multiply) {
  using S = typename C::S;
  BlockRef live[C::chunk_inputs / kSmallestBlock];
  const bool scaled = C::narrow && !std::is_same_v<typename C::P, S> && a.gates != nullptr;
  const int most = scaled ? 1 : most_of_chunk<C>(a);
  const int64_t block = a.block * a.block * static_cast<int64_t>(sizeof(typename C::T));
  bool first = true;
  for (int32_t next = piece.first; next < piece.last || first;) {
    Chunk chunk{a.refs + next, 0, begin + (next - piece.first) * block};
    if (a.gates == nullptr) {
      chunk.count = least(most, piece.last - next);
      next += chunk.count;
    } else {
      chunk.refs = live;
      for (; next < piece.last && chunk.count < most; ++next) {
        if (static_cast<const S*>(a.gates)[a.refs[next].weight] != S{0}) live[chunk.count++] = a.refs[next];
      }
    }
    if (scaled) {
      alignas(64) S part[C::group * kMaxBlock * C::lanes];
      const S gate = chunk.count > 0 ? static_cast<const S*>(a.gates)[chunk.refs[0].weight] : S{0};
      multiply(chunk, static_cast<S*>(part), true);
      add_scaled<S, C::lanes>(sums, part, static_cast<int64_t>(vectors) * a.block * C::lanes, gate, first);
    } else {
      multiply(chunk, sums, first);
    }
    first = false;
  }
}

template <class C>
typename C::S* staged_of(const ProductArgs& a, int64_t vector, int64_t output) {
  const int64_t at = vector % a.staged_vectors * a.staged_outputs + output;
  return static_cast<typename C::S*>(a.staged) + at * C::lanes;
}

// Sums [b][lanes] of a whole list.
template <class C>
void put_sums(const ProductArgs& a, int64_t to, int64_t vector, const typename C::S* sums) {
  if (a.staged == nullptr) return finish<C>(a, to, vector, sums);
  __builtin_memcpy(staged_of<C>(a, vector, to * a.block), sums,
                   sizeof(typename C::S) * static_cast<size_t>(a.block) * C::lanes);
}

template <class C>
void finish_staged(const ProductArgs& a, int64_t vector, int64_t first_output, int64_t last_output) {
  ProductArgs wide = a;
  wide.block = kStagedOutputs;
  for (int64_t output = first_output; output < last_output; output += kStagedOutputs) {
    finish<C>(wide, output / kStagedOutputs, vector, staged_of<C>(a, vector, output));
  }
}

// Sums of a group to where they belong.
template <class C>
void deliver(const ProductArgs& a, const Piece& piece, int64_t vector, int vectors, const typename C::S* sums) {
  using S = typename C::S;
  constexpr int L = C::lanes;
  for (int v = 0; v < vectors; ++v) {
    const S* s = sums + static_cast<int64_t>(v) * a.block * L;
    if (piece.slot < 0) {
      put_sums<C>(a, piece.to, vector + v, s);
    } else {
      __builtin_memcpy(partial_of<C>(a, piece.slot, vector + v), s, sizeof(S) * static_cast<size_t>(a.block) * L);
    }
  }
}

template <class C>
void multiply_group(const ProductArgs& a, const Piece& piece, int64_t begin, Ahead<C>& ahead,
                    const XView<typename C::P>& x, int64_t vector, int vectors) {
  using S = typename C::S;
  alignas(64) S sums[C::group * kMaxBlock * C::lanes];
  sum_chunks<C>(a, piece, begin, vectors, sums, [&](const Chunk& chunk, S* to, bool first) {
    multiply_chunk<C>(a, chunk, ahead, x, vectors, to, first);
  });
  deliver<C>(a, piece, vector, vectors, sums);
}

template <class C>
void multiply_piece(const ProductArgs& a, const Piece& piece, int64_t begin, Ahead<C>& ahead, Range vectors) {
  using P = typename C::P;
  constexpr int L = C::lanes, T = kTogether<P>;
  const int64_t vector = (a.inputs + T - 1) / T * L;  // of packed x, from one to the next
  const int64_t complete = a.direct ? a.n / L : 0;    // vectors that are read in place
  for (int64_t v = vectors.first; v < vectors.last;) {
    const bool direct = v < complete;
    const int64_t end = direct && complete < vectors.last ? complete : vectors.last;
    const int count = static_cast<int>(least<int64_t>(C::group, end - v));
    int64_t at[C::group];
    for (int i = 0; i < count; ++i) at[i] = direct ? (v + i) * L : (v - complete + i) * vector;
    const XView<P> x = direct ? XView<P>{static_cast<const P*>(a.x), a.x_feature, at}
                              : XView<P>{static_cast<const P*>(a.panels), L, at};
    multiply_group<C>(a, piece, begin, ahead, x, v, count);
    v += count;
  }
}

template <class C>
void multiply(const ProductArgs& a, Range pieces, Range vectors) {
  for_pieces<C>(a, pieces, [&](const Piece& piece, int64_t begin, Ahead<C>& ahead) {
    multiply_piece<C>(a, piece, begin, ahead, vectors);
  });
}

template <class C>
void combine_split(const ProductArgs& a, int64_t split, Range vectors) {
  using S = typename C::S;
  constexpr int L = C::lanes;
  const Split& s = a.splits[split];
  alignas(64) S sums[kMaxBlock * L];
  for (int64_t vector = vectors.first; vector < vectors.last; ++vector) {
    for (int64_t i = 0; i < a.block * L; i += L) {
      Vec<S, L> sum{};
      for (int64_t slot = s.first_slot; slot < s.first_slot + s.slots; ++slot) {
        sum += load_as<S, L>(partial_of<C>(a, slot, vector) + i);
      }
      store_as<S, L>(sums + i, sum);
    }
    put_sums<C>(a, s.to, vector, sums);
  }
}

template <class C>
void combine(const ProductArgs& a, Range splits, Range vectors) {
  for (int64_t split = splits.first; split < splits.last; ++split) combine_split<C>(a, split, vectors);
}

// Pairs of features. What remains after whole squares is packed one by one.
template <class C>
void pack_pairs(const ProductArgs& a, int64_t vector, int64_t first_feature, int64_t last_feature) {
  constexpr int L = C::lanes;
  const int64_t token = vector * L, tokens = least<int64_t>(L, a.n - token), features = last_feature - first_feature;
  const auto* x = static_cast<const BFloat16*>(a.x) + token * a.x_token + first_feature * a.x_feature;
  auto* panel = static_cast<BFloat16Pair*>(a.panels) + (vector * ((a.inputs + 1) / 2) + first_feature / 2) * L;
  int64_t f = 0;
  if (a.x_feature == 1) {
    for (; f + 2 * L <= features; f += 2 * L) {
      auto row = [&](int r) __attribute__((always_inline)) {
        return r < tokens ? load_pairs<L>(x + r * a.x_token + f) : Vec<uint32_t, L>{};
      };
      transpose_pairs<L>(row, panel + f / 2 * L, L);
    }
  } else if (tokens == L) {
    for (; f + 2 <= features; f += 2) {
      store_pairs<L>(panel + f / 2 * L, pair_rows<L>(x + f * a.x_feature, x + (f + 1) * a.x_feature));
    }
  }
  for (; f < features; f += 2) {
    for (int64_t t = 0; t < L; ++t) {
      auto at = [&](int64_t feature) {
        return t < tokens && feature < features ? x[t * a.x_token + feature * a.x_feature].bits : uint16_t{0};
      };
      panel[f / 2 * L + t] = {at(f), at(f + 1)};
    }
  }
}

template <class C>
void pack(const ProductArgs& a, int64_t vector, int64_t first_feature, int64_t last_feature) {
  using S = typename C::S;
  constexpr int L = C::lanes;
  const int64_t complete = a.direct ? a.n / L : 0;
  const int64_t token = vector * L, tokens = least<int64_t>(L, a.n - token), features = last_feature - first_feature;
  const auto* x = static_cast<const typename C::T*>(a.x) + token * a.x_token + first_feature * a.x_feature;
  S* panel = static_cast<S*>(a.panels) + ((vector - complete) * a.inputs + first_feature) * L;
  if (a.x_feature == 1) {
    pack_transposed<S, L>(x, a.x_token, tokens, features, panel, L);
  } else {
    for (int64_t f = 0; f < features; ++f) pack_run<S, L>(x + f * a.x_feature, tokens, L, panel + f * L);
  }
}

template <class C>
ProductKernel make_product(Isa isa) {
  constexpr auto pack_x = [] {
    if constexpr (kTogether<typename C::P> == 2) return pack_pairs<C>;
    else return pack<C>;
  }();
  return {isa,        C::dtype,         C::tile, C::lanes,       C::by_token, pack_x,  multiply<C>,
          combine<C>, finish_staged<C>, few<C>,  combine_few<C>, 0,           nullptr, nullptr};
}

}  // namespace
}  // namespace blocksparse::linear
