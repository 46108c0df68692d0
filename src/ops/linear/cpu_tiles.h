// y = f(x W^T + bias + residual) by AMX, bf16: fprop, and dgrad as fprop on the transposed layout.
//   x panels [vectors][blocks][16 tokens][b]     w [blocks, b, b]     sums [vectors][16 tokens][b], in tiles and L1
// Who does what
//   pack      one vector of 16 tokens of x, blocks side by side: rows of x as they lie, or transposed
//   multiply  one piece (an output block and its list of blocks) for a group of tokens
//               for each chunk of the list (its x stays in L1):
//                 for each strip of 16 outputs:        sums of all vectors stay in tiles over the chunk
//                   for each 32 inputs (a block if smaller):
//                     W two steps ahead is copied as [pairs of inputs][outputs][2]; x of the next step is fetched
//                     one tile of W times a tile of x of each vector
//             then finish, or store the sums of a slice, as in cpu_product.h
// Tokens are rows because x then needs no transposing and neither does y; W, the other operand, is transposed (fprop)
// or has its rows paired (dgrad) once for every 64 tokens, while the tiles multiply what was copied before.
#pragma once

#include "ops/linear/cpu_product.h"

namespace blocksparse::linear {
namespace {

constexpr int kTileRows = 16, kTileDepth = 32;  // inputs: 16 pairs

template <DType D, Tile kTile>
struct TilesConfig : ProductConfig<D, kTile, BFloat16Pair> {
  // 32 KB of x for a full group. Sums go to memory and back once a chunk, which takes as long as 32 inputs.
  static constexpr int chunk_inputs = 256, most_shared = kMaxBlock;
  static constexpr bool by_token = true;
  static_assert(kTile.outputs == kTileRows && kTile.vectors <= 4, "tiles 0..3 hold sums, 4 and 5 x, 6 W");
};

inline TileShapes product_shapes(int block) {
  const int columns = least(block, kTileRows), depth = least(block, kTileDepth);
  TileShapes shapes;
  for (int i = 0; i < 4; ++i) shapes.set(i, kTileRows, columns * 4);
  for (int i = 4; i < 6; ++i) shapes.set(i, kTileRows, depth * 2);
  shapes.set(6, depth / 2, columns * 4);
  return shapes;
}

// f.operator()<0>(), f.operator()<1>() ...: tiles are named when the code is compiled.
template <int... I, class F>
BS_INLINE void for_tiles(std::integer_sequence<int, I...>, F f) {
  (f.template operator()<I>(), ...);
}
template <int N, class F>
BS_INLINE void for_tiles(F f) {
  for_tiles(std::make_integer_sequence<int, N>(), f);
}

// copy[k / 2][o] = (W(o, k), W(o, k + 1)) for O outputs and K inputs. Rows of W are inputs (dgrad) ...
template <int O, int K>
BS_INLINE void pair_inputs(const BFloat16* w, int block, BFloat16Pair* copy) {
#pragma GCC unroll 16
  for (int k = 0; k < K; k += 2, w += 2 * block) store_pairs<O>(copy + k / 2 * O, pair_rows<O>(w, w + block));
}

// ... or outputs (fprop).
template <int O, int K>
BS_INLINE void transpose_inputs(const BFloat16* w, int block, BFloat16Pair* copy) {
  constexpr int Q = K / 2;  // no more than O
#pragma GCC unroll 2
  for (int o = 0; o < O; o += Q) {
    transpose_pairs<Q>([&](int r) { return load_pairs<Q>(w + (o + r) * block); }, copy + o, O);
  }
}

// The same where only `depth` inputs exist: what lies beyond may be anything.
template <int O, int K>
void copy_inputs_that_exist(const BFloat16* w, int64_t output, int64_t input, int64_t depth, BFloat16Pair* copy) {
  for (int64_t k = 0; k < K; k += 2) {
    for (int64_t o = 0; o < O; ++o) {
      const BFloat16* at = w + o * output + k * input;
      copy[k / 2 * O + o] = {k < depth ? at[0].bits : uint16_t{0}, k + 1 < depth ? at[input].bits : uint16_t{0}};
    }
  }
}

// The tile of a block's W that begins at (strip, k). Not inlined: one copy for any number of vectors.
template <int O, int K>
__attribute__((noinline)) void copy_tile(const ProductArgs& a, const BlockRef& ref, int strip, int k,
                                         BFloat16Pair* copy) {
  const int64_t b = a.block, depth = a.inputs - ref.from * b - k, output = a.by_in ? 1 : b, input = a.by_in ? b : 1;
  const auto* w = static_cast<const BFloat16*>(a.w) + ref.weight * b * b + strip * output + k * input;
  if (depth < K) copy_inputs_that_exist<O, K>(w, output, input, depth, copy);
  else if (a.by_in) pair_inputs<O, K>(w, a.block, copy);
  else transpose_inputs<O, K>(w, a.block, copy);
}

// What a strip multiplies: x and sums of the first vector, the next ones `x_vector` and 16 b further.
struct TileStrip {
  const BFloat16* x;
  int64_t x_vector;
  float* sums;
  int strip;
};

// Asks for x [V * 16 tokens, K inputs].
template <int V, int K>
BS_INLINE void prefetch_x(const BFloat16* x, int64_t x_vector, int block) {
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v, x += x_vector) {
    if (block == K) {
#pragma GCC unroll 16
      for (int line = 0; line < K / 2; ++line) __builtin_prefetch(x + line * 32);
    } else {
#pragma GCC unroll 16
      for (int t = 0; t < kTileRows; ++t) __builtin_prefetch(x + t * block);
    }
  }
}

// sums [V * 16 tokens][O outputs] (+)= x W^T over a chunk, K inputs at a time.
template <int V, int O, int K>
void multiply_tiles(const ProductArgs& a, const Chunk& chunk, const TileStrip& s, bool first) {
  constexpr int kAhead = 2, kCopies = 4;  // no load waits for the stores of a copy that was just made
  alignas(64) BFloat16Pair copies[kCopies][K / 2 * O];
  const int64_t b = a.block, sum_row = b * 4, sum_vector = kTileRows * b, x_vector = s.x_vector;
  const int per_block = a.block / K, steps = chunk.count * per_block;
  auto copy = [&](int step) __attribute__((always_inline)) {
    copy_tile<O, K>(a, chunk.refs[step / per_block], s.strip, step % per_block * K, copies[step % kCopies]);
  };
  auto x_of = [&](int step) __attribute__((always_inline)) {
    return s.x + chunk.refs[step / per_block].from * (kTileRows * b) + step % per_block * K;
  };
  for (int step = 0; step < steps && step < kAhead; ++step) copy(step);
  for_tiles<V>([&]<int I>() __attribute__((always_inline)) {
    if (first) tile_zero<I>();
    else tile_load<I>(s.sums + I * sum_vector, sum_row);
  });
  for (int step = 0; step < steps; ++step) {
    if (step + kAhead < steps) copy(step + kAhead);
    if (s.strip == 0 && step + 1 < steps) prefetch_x<V, K>(x_of(step + 1), x_vector, a.block);
    const BFloat16* x = x_of(step);
    tile_load<6>(copies[step % kCopies], O * 4);
    for_tiles<V>([&]<int I>() __attribute__((always_inline)) {
      tile_load<4 + I % 2>(x + I * x_vector, b * 2);
      tile_multiply<I, 4 + I % 2, 6>();
    });
  }
  for_tiles<V>([&]<int I>() __attribute__((always_inline)) { tile_store<I>(s.sums + I * sum_vector, sum_row); });
}

template <int O, int K>
void multiply_strip(const ProductArgs& a, const Chunk& chunk, const TileStrip& s, int vectors, bool first) {
  switch (vectors) {
    case 1: return multiply_tiles<1, O, K>(a, chunk, s, first);
    case 2: return multiply_tiles<2, O, K>(a, chunk, s, first);
    case 3: return multiply_tiles<3, O, K>(a, chunk, s, first);
    default: return multiply_tiles<4, O, K>(a, chunk, s, first);
  }
}

template <class C>
void multiply_chunk_by_tiles(const ProductArgs& a, const Chunk& chunk, Ahead<C>* ahead, const BFloat16* x,
                             int64_t x_vector, int vectors, float* sums, bool first) {
  static_assert(C::group <= C::tile.vectors);
  const char* later[kMostOfChunk];
  const int asking = ahead != nullptr ? chunk.count : 0;
  for (int i = 0; i < asking; ++i) later[i] = ahead->next();
  for (int strip = 0; strip < a.block; strip += kTileRows) {
    for (int i = 0; i < asking; ++i) Ahead<C>::ask(later[i], bytes_of_strip<C>(a, strip));
    const TileStrip s{x, x_vector, sums + strip, strip};
    if (a.block >= 32) multiply_strip<16, 32>(a, chunk, s, vectors, first);
    else if (a.block == 16) multiply_strip<16, 16>(a, chunk, s, vectors, first);
    else multiply_strip<8, 8>(a, chunk, s, vectors, first);
  }
}

inline int64_t panel_features(const ProductArgs& a) { return (a.inputs + a.block - 1) / a.block * a.block; }

template <class C>
void multiply_piece_by_tiles(const ProductArgs& a, const Piece& piece, Ahead<C>& ahead, Range range) {
  const int64_t x_vector = kTileRows * panel_features(a);
  for (int64_t v = range.first; v < range.last; v += C::group) {
    alignas(64) float sums[C::group * kTileRows * kMaxBlock];
    const int vectors = static_cast<int>(least<int64_t>(C::group, range.last - v));
    const auto* x = static_cast<const BFloat16*>(a.panels) + v % a.panel_vectors * x_vector;
    Ahead<C>* asks = v == range.first ? &ahead : nullptr;
    sum_chunks<C>(a, piece, vectors, sums, [&](const Chunk& chunk, float* to, bool first, bool) {
      multiply_chunk_by_tiles<C>(a, chunk, asks, x, x_vector, vectors, to, first);
    });
    deliver<C>(a, piece, v, vectors, sums);
  }
}

template <class C>
void multiply_by_tiles(const ProductArgs& a, Range pieces, Range vectors) {
  tile_configure(product_shapes(a.block));  // with the release 74 ns, more than 8 products
  Ahead<C> ahead(a, pieces);
  for (int64_t p = pieces.first; p < pieces.last; ++p) multiply_piece_by_tiles<C>(a, a.pieces[p], ahead, vectors);
  tile_release();
}

// [features][16 tokens] to [16 tokens][block].
template <int Q>
void transpose_tokens(const BFloat16* from, int64_t stride, int block, BFloat16* to) {
  for (int f = 0; f < block; f += 2 * Q) {
    for (int t = 0; t < kTileRows; t += Q) {
      Vec<uint32_t, Q> square[Q];
#pragma GCC unroll 16
      for (int r = 0; r < Q; ++r) {
        const BFloat16* pair = from + (f + 2 * r) * stride + t;
        square[r] = pair_rows<Q>(pair, pair + stride);
      }
      transpose<uint32_t, Q>(square);
#pragma GCC unroll 16
      for (int r = 0; r < Q; ++r) __builtin_memcpy(to + (t + r) * block + f, &square[r], sizeof(square[r]));
    }
  }
}

// Rows of tokens as they lie, Q features at a time.
template <int Q>
void copy_tokens(const ProductArgs& a, const BFloat16* x, int64_t tokens, int64_t features, BFloat16* to) {
  for (int64_t t = 0; t < tokens; ++t, x += a.x_token) {
    BFloat16* row = to + t * a.block;
    for (int64_t f = 0; f < features; f += a.block, row += kTileRows * a.block) {
      for (int i = 0; i < a.block; i += Q) __builtin_memcpy(row + i, x + f + i, sizeof(BFloat16) * Q);
    }
  }
}

// A block that is not all there.
inline void pack_part(const ProductArgs& a, const BFloat16* x, int64_t tokens, int64_t features, BFloat16* to) {
  for (int64_t t = 0; t < kTileRows; ++t) {
    for (int64_t f = 0; f < a.block; ++f) {
      to[t * a.block + f] = t < tokens && f < features ? x[t * a.x_token + f * a.x_feature] : BFloat16{0};
    }
  }
}

template <class C>
void pack_for_tiles(const ProductArgs& a, int64_t vector, int64_t first_feature, int64_t last_feature) {
  const int64_t token = vector * kTileRows, tokens = least<int64_t>(kTileRows, a.n - token), b = a.block;
  const auto* x = static_cast<const BFloat16*>(a.x) + token * a.x_token;
  BFloat16* panel = static_cast<BFloat16*>(a.panels) + vector % a.panel_vectors * kTileRows * panel_features(a);
  const int64_t whole = tokens < kTileRows ? first_feature : last_feature / b * b;
  if (a.x_feature == 1) {
    BFloat16* to = panel + first_feature * kTileRows;
    if (b >= 32) copy_tokens<32>(a, x + first_feature, kTileRows, whole - first_feature, to);
    else if (b == 16) copy_tokens<16>(a, x + first_feature, kTileRows, whole - first_feature, to);
    else copy_tokens<8>(a, x + first_feature, kTileRows, whole - first_feature, to);
  } else {
    for (int64_t feature = first_feature; feature < whole; feature += b) {
      const BFloat16* from = x + feature * a.x_feature;
      BFloat16* to = panel + feature * kTileRows;
      if (b >= 32) transpose_tokens<16>(from, a.x_feature, a.block, to);
      else if (b == 16) transpose_tokens<8>(from, a.x_feature, a.block, to);
      else transpose_tokens<4>(from, a.x_feature, a.block, to);
    }
  }
  for (int64_t feature = whole; feature < last_feature; feature += b) {
    pack_part(a, x + feature * a.x_feature, tokens, least(b, last_feature - feature), panel + feature * kTileRows);
  }
}

template <class C>
ProductKernel make_tile_product(Isa isa) {
  return {.isa = isa,
          .dtype = C::dtype,
          .tile = C::tile,
          .lanes = C::lanes,
          .by_token = C::by_token,
          .side_by_side = false,
          .pack = pack_for_tiles<C>,
          .multiply = multiply_by_tiles<C>,
          .combine = combine<C>,
          .finish_staged = nullptr,
          .few = few<C>,
          .combine_few = combine_few<C>,
          .along_outputs = 0,
          .tap_group = 0,
          .pack_tap_weights = nullptr,
          .multiply_taps = nullptr};
}

}  // namespace
}  // namespace blocksparse::linear
