// y = f(x W^T + bias + residual) on the CPU, for any element type and instruction set: fprop, and dgrad as fprop on the
// transposed layout. Tokens are the vectors.
//   x panels [vectors][inputs][lanes]     w [blocks, b, b]     sums [vectors][b][lanes], in registers and L1
//   AVX2: x panels [tiles][inputs][vectors of a tile][lanes]. For f32 in place, the loop over tiles is outside of
//   strips. With pairs a lane holds two inputs, and "inputs" below counts pairs.
// Who does what
//   pack      one vector of tokens of x, transposed if need be, widened to the type of sums
//   multiply  one piece (an output block and its list of blocks) for a group of tokens
//               for each chunk of the list (its rows of x stay in L1 or L2)
//                 for each strip of tile.outputs rows of W:      in place, or a widened copy: see copies() in weights.h
//                   for each tile of tile.vectors of tokens:     sums stay in registers over the chunk
//             then finish: bias, residual, activation, store. Without an epilogue, and for a slice of a split row, the
//             last chunk's sums go from the registers to their destination
//   combine   adds the sums of slices in their fixed order, then finishes
#pragma once

#include <type_traits>

#include "core/ceil_div.h"
#include "gemm/cpu/few_tokens.h"
#include "gemm/cpu/finish.h"
#include "gemm/cpu/outputs.h"
#include "gemm/cpu/product_pack.h"
#include "gemm/cpu/product_tile.h"

namespace blocksparse::gemm {
namespace {

// Whether a tile of vectors goes through all strips of a chunk before the next tile. With 32 KB of L1 this keeps the
// chunk's x for the tile in L1.
template <class C>
constexpr bool kStripsInside = kVectorBytes == 32 && C::dtype == DType::f32;

// Some vectors of a group. Only the first tile asks for later W. A block of 8 serves two strips only, so x comes from
// L2 most of the time: with AVX2 the first strip asks for x a block ahead. Zen 3, 1024 x 1024, 64 tokens, 10 %: b = 8
// 260 us -> 251. b = 16 is even, b = 32 4 % slower.
template <class C, int O, int V, class WView>
void multiply_some(const Entries& entries, const WView& w, const XView<typename C::P>& x, int v,
                   const SumsAt<const typename C::S>& from, const SumsAt<typename C::S>& to) {
  using S = typename C::S;
  using P = typename C::P;
  const XView<P> xv{x.data, x.at + v, x.feature + v};
  const SumsAt<const S> fv{from.data == nullptr ? nullptr : from.data + v * from.vector, from.output, from.vector};
  const SumsAt<S> tv{to.data + v * to.vector, to.output, to.vector};
  if constexpr (kInLoop<C>) {
    if (v == 0 && entries.ask) return multiply_tile<S, P, C::lanes, O, V, true>(entries, w, xv, fv, tv);
  }
  if constexpr (kStripsInside<C> && WView::kDepth == kSmallestBlock) {
    if (w.strip == 0 && *xv.feature == V * C::lanes)
      return multiply_tile<S, P, C::lanes, O, V, true>(entries, w, xv, fv, tv);
  }
  multiply_tile<S, P, C::lanes, O, V, false>(entries, w, xv, fv, tv);
}

// Calls body.operator()<V>(v) for all vectors of a group, tile by tile.
template <class C, class Body>
BS_INLINE void each_tile(int vectors, Body body) {
  for (int v = 0; v < vectors;) {
    const int tile = vectors_of_tile<C>(vectors - v);
    if (C::tile.vectors >= 3 && tile == 3) body.template operator()<3>(v);
    else if (tile == 2) body.template operator()<2>(v);
    else body.template operator()<1>(v);
    v += tile;
  }
}

template <class C, int O, class WView>
void multiply_vectors(const Entries& entries, const WView& w, const XView<typename C::P>& x, int vectors,
                      const SumsAt<const typename C::S>& from, const SumsAt<typename C::S>& to) {
  each_tile<C>(vectors, [&]<int V>(int v) { multiply_some<C, O, V>(entries, w, x, v, from, to); });
}

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

// Calls body(view) for one strip of W in place.
template <class C, class Body>
BS_INLINE void in_place(const ProductArgs& a, int strip, Body body) {
  using P = typename C::P;
  const auto* w = static_cast<const P*>(a.w);
  const bool whole = a.inputs % kSmallestBlock == 0;
  if constexpr (kTogether<P> == 1) {
    if (a.by_in && a.block == kSmallestBlock && whole) {
      if (a.asks_again) return body(ColumnsOfW<P, kSmallestBlock, true>{w, strip, a.block});
      return body(ColumnsOfW<P, kSmallestBlock>{w, strip, a.block});
    }
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

// All strips of a chunk: to [b, vectors] = from + W x. ahead: null if W has been asked for.
template <class C>
void multiply_chunk(const ProductArgs& a, const Chunk& chunk, Ahead<C>* ahead, const XView<typename C::P>& x,
                    int vectors, SumsAt<const typename C::S> from, SumsAt<typename C::S> to) {
  using P = typename C::P;
  constexpr int T = kTogether<P>, O = C::tile.outputs;
  Entry list[kMostOfChunk];
  const int64_t block = a.block / T, inputs = ceil_div(a.inputs, T);
  for (int i = 0; i < chunk.count; ++i) {
    const int64_t begin = chunk.refs[i].from * block;
    list[i] = {begin, chunk.refs[i].weight, least(block, inputs - begin), ahead != nullptr ? ahead->next() : nullptr};
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

// Sums [vectors][b][lanes] of a group, or [vectors][lanes][b]. multiply(chunk, sums, first, last) does one chunk; after
// the last chunk the sums are not read again. Gates scale W where it is copied in the type of sums. Scaled pairs would
// be rounded, so their sums are scaled instead.
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

// Takes the sums [b][lanes] of a whole list.
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

// Brings the sums of a group to their destination.
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

// Where sums [b, vectors] may go straight from the registers: there is nothing left to do with them.
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
void multiply(const ProductArgs& a, Range pieces, Range vectors) {
  if constexpr (kAlongOutputs<C>) {
    if (a.along_outputs) return multiply_along_outputs<C>(a, pieces, vectors);
  }
  using P = typename C::P;
  constexpr int L = C::lanes;
  Ahead<C> ahead(a, pieces);
  const int64_t complete = a.direct ? a.n / L : 0;  // vectors that are read in place
  for (int64_t v = vectors.first; v < vectors.last;) {
    const bool direct = v < complete;
    const int64_t end = direct && complete < vectors.last ? complete : vectors.last;
    const int count = static_cast<int>(least<int64_t>(C::group, end - v));
    const PackedGroup group = direct ? PackedGroup{} : group_of<C>(a, v - complete);
    int64_t at[C::group], feature[C::group];
    for (int i = 0; i < count; ++i) {
      const PanelPlace place =
          direct ? PanelPlace{(v + i) * L, a.x_feature} : panel_place<C>(a, group, v - complete + i);
      at[i] = place.at;
      feature[i] = place.input;
    }
    const XView<P> x{static_cast<const P*>(direct ? a.x : a.panels), at, feature};
    for (int64_t p = pieces.first; p < pieces.last; ++p) {
      multiply_group<C>(a, a.pieces[p], v == vectors.first ? &ahead : nullptr, x, v, count);
    }
    v += count;
  }
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
void pack_either(const ProductArgs& a, int64_t vector, int64_t first_feature, int64_t last_feature) {
  if (a.along_outputs) pack_tokens<C>(a, vector, first_feature, last_feature);
  else pack<C>(a, vector, first_feature, last_feature);
}

template <class C>
ProductKernel make_product(Isa isa) {
  constexpr auto pack_x = [] {
    if constexpr (kTogether<typename C::P> == 2) return pack_pairs<C>;
    else if constexpr (kAlongOutputs<C>) return pack_either<C>;
    else return pack<C>;
  }();
  return {.isa = isa,
          .dtype = C::dtype,
          .tile = C::tile,
          .lanes = C::lanes,
          .by_token = C::by_token,
          .side_by_side = kSideBySide<C>,
          .pack = pack_x,
          .multiply = multiply<C>,
          .combine = combine<C>,
          .finish_staged = finish_staged<C>,
          .few = few<C>,
          .combine_few = combine_few<C>,
          .along_outputs = kAlongOutputs<C> ? (kOneVector<C> ? 1 : 2) * C::lanes : 0,
          .tap_group = 0,
          .pack_tap_weights = nullptr,
          .multiply_taps = nullptr};
}

}  // namespace
}  // namespace blocksparse::gemm
