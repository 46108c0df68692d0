// y = f(x W^T + bias + residual) on the CPU, for any element type and instruction set: fprop, and dgrad as fprop on the
// transposed layout.
//   x panels [vectors][inputs][lanes]     w [blocks, b, b]     sums [vectors][b][lanes], in registers and L1
//   AVX2: x panels [groups][inputs][vectors of a group][lanes], and for plain f32 tiles are outside of strips.
//   Panels of pairs hold two inputs in a lane, and inputs below are then pairs of them.
// Who does what
//   pack      one vector of tokens of x, transposed if need be, widened to the type of sums
//   multiply  one piece (an output block and its list of blocks) for a group of tokens
//               for each chunk of the list (its rows of x stay in L1 or L2)
//                 for each strip of tile.outputs rows of W:      but for plain f32: the strip is copied, widened
//                   for each tile of tile.vectors of tokens:     sums stay in registers over the chunk
//             then finish: bias, residual, activation, store. Where nothing of that is left to be done, and for sums of
//             a slice of a split row, the last chunk's sums go from the registers to where they belong
//   combine   adds the sums of slices in their fixed order, then finishes
#pragma once

#include <type_traits>

#include "cpu/simd_tile.h"
#include "ops/linear/cpu_ahead.h"
#include "ops/linear/cpu_few.h"
#include "ops/linear/cpu_finish.h"
#include "ops/linear/cpu_outputs.h"
#include "ops/linear/cpu_product_pack.h"
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
  int64_t x;          // offset of the first row
  int64_t weight;     // which block of W
  int64_t depth;      // rows
  const char* later;  // a block of W that is used some time after this one
};

// Sums are at data + output * o + vector * v, lanes side by side.
template <class S>
struct SumsAt {
  S* data = nullptr;
  int64_t output = 0, vector = 0;
};

struct Entries {
  const Entry* data;
  int count;
  bool ask;      // for W that is used later ...
  int64_t part;  // of which this is the strip's part, in bytes from the beginning of the block
};

// The inner loop: to [O, V vectors] = from + W strip [O, inputs of the entries] x [inputs of the entries, V vectors].
// Not inlined: bf16, f16 and f32 share one copy, which halves the time to compile.
//   from  null data: 0      kAsk  for W that is used later, some at a time: no burst holds up the products
template <class S, class P, int L, int O, int V, bool kAsk, class WView>
__attribute__((noinline)) void multiply_tile(const Entries& entries, const WView& w, const XView<P>& x,
                                             const SumsAt<const S>& from, const SumsAt<S>& to) {
  int64_t at[V];
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) at[v] = x.at[v];
  Vec<S, L> sum[O][V];
#pragma GCC unroll 16
  for (int o = 0; o < O; ++o) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      sum[o][v] = kAddsLast || from.data == nullptr ? Vec<S, L>{}
                                                    : load_as<S, L>(from.data + o * from.output + v * from.vector);
    }
  }
  constexpr int kPart = kUnroll * O * static_cast<int>(sizeof(P)) / kTogether<P>;
  for (int i = 0; i < entries.count; ++i) {
    const P* xb = x.data + entries.data[i].x;
    const P* wb = w.block(entries.data[i].weight, i);
    const char* later = entries.data[i].later + entries.part;
    if constexpr (kAsk && WView::kScattered) {  // what was asked for has left L1 again: dgrad, b = 8 5 % faster
      const auto* near =
          reinterpret_cast<const char*>(w.block(entries.data[i + 1 < entries.count ? i + 1 : i].weight, i));
#pragma GCC unroll 8
      for (int byte = 0; byte < kPart; byte += kLine) __builtin_prefetch(near + byte);
    }
    auto step = [&]() __attribute__((always_inline)) {
      Vec<P, L> xv[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) xv[v] = in_register(operand<P, L>(xb + at[v]));
      xb = next_row(xb + x.feature);
#pragma GCC unroll 16
      for (int o = 0; o < O; ++o) {
        const Vec<P, L> wv = in_register(operand_in_all_lanes<P, L>(wb + o * WView::kOutput));
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) add_product<S, L>(sum[o][v], wv, xv[v]);
      }
      wb = next_row(wb + w.input());
    };
    const int64_t depth = WView::kDepth > 0 ? WView::kDepth : entries.data[i].depth;
    constexpr int kSteps = kUnroll / kTogether<P>;
    int64_t k = 0;
    for (; k + kSteps <= depth; k += kSteps) {
      if constexpr (kAsk) {
#pragma GCC unroll 8
        for (int byte = 0; byte < kPart; byte += kLine) __builtin_prefetch(later + byte);
        later += kPart;
      }
#pragma GCC unroll 8
      for (int u = 0; u < kSteps; ++u) step();
    }
    for (; k < depth; ++k) step();
  }
  const bool adds = kAddsLast && from.data != nullptr;
#pragma GCC unroll 16
  for (int o = 0; o < O; ++o) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      if (adds) sum[o][v] += load_as<S, L>(from.data + o * from.output + v * from.vector);
      store_as<S, L>(to.data + o * to.output + v * to.vector, sum[o][v]);
    }
  }
}

// Some vectors of a group. Only their first tile asks for what is used later.
template <class C, int O, int V, class WView>
void multiply_some(const Entries& entries, const WView& w, const XView<typename C::P>& x, int v,
                   const SumsAt<const typename C::S>& from, const SumsAt<typename C::S>& to) {
  using S = typename C::S;
  using P = typename C::P;
  const XView<P> xv{x.data, x.feature, x.at + v};
  const SumsAt<const S> fv{from.data == nullptr ? nullptr : from.data + v * from.vector, from.output, from.vector};
  const SumsAt<S> tv{to.data + v * to.vector, to.output, to.vector};
  if constexpr (kInLoop<C>) {
    if (v == 0 && entries.ask) return multiply_tile<S, P, C::lanes, O, V, true>(entries, w, xv, fv, tv);
  }
  multiply_tile<S, P, C::lanes, O, V, false>(entries, w, xv, fv, tv);
}

// body.operator()<V>(v) for all vectors of a group, in tiles of C::tile.vectors and fewer: never a single one next to a
// full tile, which would leave the FMA units idle between dependent sums.
template <class C, class Body>
BS_INLINE void each_tile(int vectors, Body body) {
  for (int v = 0; v < vectors;) {
    const int left = vectors - v;
    if (C::tile.vectors >= 3 && left >= 3 && left != 4) {
      body.template operator()<3>(v);
      v += 3;
    } else if (left >= 2) {
      body.template operator()<2>(v);
      v += 2;
    } else {
      body.template operator()<1>(v);
      v += 1;
    }
  }
}

template <class C, int O, class WView>
void multiply_vectors(const Entries& entries, const WView& w, const XView<typename C::P>& x, int vectors,
                      const SumsAt<const typename C::S>& from, const SumsAt<typename C::S>& to) {
  each_tile<C>(vectors, [&]<int V>(int v) { multiply_some<C, O, V>(entries, w, x, v, from, to); });
}

// Whether a tile of vectors goes through all strips of a chunk before the next one: with 32 KB of L1, that the chunk's
// x for this tile stays there.
template <class C>
constexpr bool kStripsInside = kVectorBytes == 32 && C::dtype == DType::f32;

template <class C, class WView>
void multiply_strips_inside(const ProductArgs& a, const Entries& entries, WView w, const XView<typename C::P>& x,
                            int vectors, const SumsAt<const typename C::S>& from, const SumsAt<typename C::S>& to) {
  constexpr int O = C::tile.outputs;
  each_tile<C>(vectors, [&]<int V>(int v) {
    for (w.strip = 0; w.strip < a.block; w.strip += O) {
      const SumsAt<const typename C::S> first{from.data == nullptr ? nullptr : from.data + w.strip * from.output,
                                              from.output, from.vector};
      const SumsAt<typename C::S> last{to.data + w.strip * to.output, to.output, to.vector};
      if (v == 0 && entries.ask) {
        const Range part = bytes_of_strip<C>(a, w.strip);
        for (int i = 0; i < entries.count; ++i) Ahead<C>::ask(entries.data[i].later, part);
      }
      multiply_some<C, O, V>(entries, w, x, v, first, last);
    }
  });
}

// body(view of W where it lies) for one strip.
template <class C, class Body>
BS_INLINE void in_place(const ProductArgs& a, int strip, Body body) {
  using P = typename C::P;
  const auto* w = static_cast<const P*>(a.w);
  const bool whole = a.inputs % kSmallestBlock == 0;
  if constexpr (kTogether<P> == 1) {
    if (a.by_in && a.block == kSmallestBlock && whole) return body(ColumnsOfW<P, kSmallestBlock>{w, strip, a.block});
    if (a.by_in) return body(ColumnsOfW<P, 0>{w, strip, a.block});
  }
  switch (a.block) {
    case 8: return whole ? body(RowsOfW<P, 8, true>{w, strip}) : body(RowsOfW<P, 8>{w, strip});
    case 16: return body(RowsOfW<P, 16>{w, strip});
    case 32: return body(RowsOfW<P, 32>{w, strip});
    case 64: return body(RowsOfW<P, 64>{w, strip});
    default: return body(RowsOfW<P, 128>{w, strip});
  }
}

// All strips of a chunk: to [b, vectors] = from + W x. ahead: null, if W has been asked for.
template <class C>
void multiply_chunk(const ProductArgs& a, const Chunk& chunk, Ahead<C>* ahead, const XView<typename C::P>& x,
                    int vectors, SumsAt<const typename C::S> from, SumsAt<typename C::S> to) {
  using P = typename C::P;
  constexpr int T = kTogether<P>, O = C::tile.outputs;
  Entry list[kMostOfChunk];
  const int64_t block = a.block / T, inputs = (a.inputs + T - 1) / T;
  for (int i = 0; i < chunk.count; ++i) {
    const int64_t begin = chunk.refs[i].from * block;
    list[i] = {begin * x.feature, chunk.refs[i].weight, least(block, inputs - begin),
               ahead != nullptr ? ahead->next() : nullptr};
  }
  if constexpr (kStripsInside<C>) {
    if (!copies<C>(a)) {
      const Entries entries{list, chunk.count, ahead != nullptr, 0};
      in_place<C>(a, 0, [&](const auto& view) { multiply_strips_inside<C>(a, entries, view, x, vectors, from, to); });
      return;
    }
  }
  constexpr int kMostCopied = T == 2 ? 2 * kSmallestBlock : O;
  alignas(64) P strips[kMaxBlock / T * kMostCopied];
  const int width = copied_outputs<C>(a);
  for (int strip = 0; strip < a.block; strip += O) {
    const Range part = bytes_of_strip<C>(a, strip);
    const Entries entries{list, chunk.count, ahead != nullptr && kInLoop<C>, part.first};
    if (ahead != nullptr && !kInLoop<C>) {
      for (int i = 0; i < chunk.count; ++i) Ahead<C>::ask(list[i].later, part);
    }
    if (copies<C>(a)) {
      for (int i = 0; strip % width == 0 && i < chunk.count; ++i) {
        copy_strips<C>(a, chunk.refs[i], strip, strips + i * block * width);
      }
      const CopyOfW<P> view{strips + strip % width, static_cast<int>(block), width};
      multiply_vectors<C, O>(entries, view, x, vectors, from, to);
    } else if constexpr (C::dtype == DType::f32 || T == 2) {
      in_place<C>(a, strip, [&](const auto& view) { multiply_vectors<C, O>(entries, view, x, vectors, from, to); });
    }
    if (from.data != nullptr) from.data += O * from.output;
    to.data += O * to.output;
  }
}

// sums (+)= scale * part
template <class S, int L>
void add_scaled(S* sums, const S* part, int64_t count, S scale, bool first) {
  for (int64_t i = 0; i < count; i += L) {
    const Vec<S, L> scaled = load_as<S, L>(part + i) * scale;
    store_as<S, L>(sums + i, first ? scaled : load_as<S, L>(sums + i) + scaled);
  }
}

// sums [vectors][b][lanes] of a group, or [vectors][lanes][b]. multiply(chunk, sums, first, last) does a chunk: after
// the last one, nobody reads sums. Gates scale W where it is copied in the type of sums; to scale pairs would round
// them, so their sums are scaled instead.
template <class C, class Multiply>
void sum_chunks(const ProductArgs& a, const Piece& piece, int vectors, typename C::S* sums, Multiply multiply) {
  using S = typename C::S;
  BlockRef live[kMostOfChunk];
  const bool scaled = C::narrow && !std::is_same_v<typename C::P, S> && a.gates != nullptr;
  const int most = scaled ? 1 : most_of_chunk<C>(a);
  bool first = true;
  for (int32_t next = piece.first; next < piece.last || first; first = false) {
    Chunk chunk{a.refs + next, 0};
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
      multiply(chunk, static_cast<S*>(part), true, false);
      add_scaled<S, C::lanes>(sums, part, static_cast<int64_t>(vectors) * a.block * C::lanes, gate, first);
    } else {
      multiply(chunk, sums, first, next == piece.last);
    }
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

// Where sums [b, vectors] may go from the registers, if nothing is left to be done with them.
template <class C>
SumsAt<typename C::S> destination(const ProductArgs& a, const Piece& piece, int64_t vector, int vectors) {
  constexpr int L = C::lanes;
  const int64_t output = static_cast<int64_t>(piece.to) * a.block;
  if (piece.slot >= 0) return {partial_of<C>(a, piece.slot, vector), L, static_cast<int64_t>(a.block) * L};
  if (a.staged != nullptr) return {staged_of<C>(a, vector, output), L, a.staged_outputs * L};
  if constexpr (!C::narrow) {
    const bool whole = (vector + vectors) * L <= a.n && output + a.block <= a.outputs;
    if (whole && a.y_token == 1 && is_plain(a)) {
      return {static_cast<typename C::S*>(a.y) + output * a.y_feature + vector * L, a.y_feature, L};
    }
  }
  return {};
}

template <class C>
void multiply_group(const ProductArgs& a, const Piece& piece, Ahead<C>* ahead, const XView<typename C::P>& x,
                    int64_t vector, int vectors) {
  using S = typename C::S;
  alignas(64) S sums[C::group * kMaxBlock * C::lanes];
  const bool scaled = C::narrow && !std::is_same_v<typename C::P, S> && a.gates != nullptr;
  const SumsAt<S> end = scaled ? SumsAt<S>{} : destination<C>(a, piece, vector, vectors);
  const int64_t stride = static_cast<int64_t>(a.block) * C::lanes;
  sum_chunks<C>(a, piece, vectors, sums, [&](const Chunk& chunk, S* part, bool first, bool last) {
    const SumsAt<S> to = last && end.data != nullptr ? end : SumsAt<S>{part, C::lanes, stride};
    multiply_chunk<C>(a, chunk, ahead, x, vectors, {first ? nullptr : part, C::lanes, stride}, to);
  });
  if (end.data == nullptr) deliver<C>(a, piece, vector, vectors, sums);
}

template <class C>
void multiply_piece(const ProductArgs& a, const Piece& piece, Ahead<C>& ahead, Range vectors) {
  using P = typename C::P;
  constexpr int L = C::lanes;
  const int64_t complete = a.direct ? a.n / L : 0;  // vectors that are read in place
  for (int64_t v = vectors.first; v < vectors.last;) {
    const bool direct = v < complete;
    const int64_t end = direct && complete < vectors.last ? complete : vectors.last;
    const int count = static_cast<int>(least<int64_t>(C::group, end - v));
    int64_t at[C::group];
    for (int i = 0; i < count; ++i) at[i] = direct ? (v + i) * L : panel_place<C>(a, v - complete + i).at;
    const XView<P> x = direct ? XView<P>{static_cast<const P*>(a.x), a.x_feature, at}
                              : XView<P>{static_cast<const P*>(a.panels), panel_place<C>(a, v - complete).input, at};
    multiply_group<C>(a, piece, v == vectors.first ? &ahead : nullptr, x, v, count);
    v += count;
  }
}

template <class C>
void multiply(const ProductArgs& a, Range pieces, Range vectors) {
  if constexpr (kAlongOutputs<C>) {
    if (a.along_outputs) return multiply_along_outputs<C>(a, pieces, vectors);
  }
  Ahead<C> ahead(a, pieces);
  for (int64_t p = pieces.first; p < pieces.last; ++p) multiply_piece<C>(a, a.pieces[p], ahead, vectors);
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
    if (a.along_outputs) finish_tokens<C>(a, s.to, vector * L, least<int64_t>(L, a.n - vector * L), sums);
    else put_sums<C>(a, s.to, vector, sums);
  }
}

template <class C>
void combine(const ProductArgs& a, Range splits, Range vectors) {
  for (int64_t split = splits.first; split < splits.last; ++split) combine_split<C>(a, split, vectors);
}

template <class C>
ProductKernel make_product(Isa isa) {
  constexpr auto pack_x = [] {
    if constexpr (kTogether<typename C::P> == 2) return pack_pairs<C>;
    else return pack<C>;
  }();
  return {.isa = isa,
          .dtype = C::dtype,
          .tile = C::tile,
          .lanes = C::lanes,
          .by_token = C::by_token,
          .pack = pack_x,
          .multiply = multiply<C>,
          .combine = combine<C>,
          .finish_staged = finish_staged<C>,
          .few = few<C>,
          .combine_few = combine_few<C>,
          .along_outputs = kAlongOutputs<C> ? 2 * C::lanes : 0,
          .tap_group = 0,
          .pack_tap_weights = nullptr,
          .multiply_taps = nullptr};
}

}  // namespace
}  // namespace blocksparse::linear
