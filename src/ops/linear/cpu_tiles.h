// y = f(x W^T + bias + residual) by AMX, bf16: fprop, and dgrad as fprop on the transposed layout.
//   x panels [vectors][blocks][16 tokens][b]     w [blocks, b, b]     sums [vectors][16 tokens][b], in tiles and L1
// Who does what
//   pack      one vector of 16 tokens of x, blocks side by side: rows of x as they lie, or transposed
//   multiply  one piece (an output block and its list of blocks) for a group of tokens
//               for each chunk of the list:
//                 for each strip of up to 32 outputs:    W is copied as [pairs of inputs][outputs][2]
//                   for each 2 x 2 tiles (1 x 4 below 32 outputs) of sums: they stay in tiles over the chunk
//             then finish, or store the sums of a slice, as in cpu_product.h
// Tokens are rows because x then needs no transposing and neither does y; W, the other operand, is transposed (fprop)
// or has its rows paired (dgrad) once for every 64 tokens.
#pragma once

#include "ops/linear/cpu_product.h"

namespace blocksparse::linear {
namespace {

constexpr int kTileRows = 16, kTileDepth = 32;  // inputs: 16 pairs
constexpr int kTileStrip = 32;                  // outputs
constexpr int kTileSums = 4;                    // tiles 0..3 hold sums, 4 and 5 x, 6 and 7 W

template <DType D, Tile kTile>
struct TilesConfig : ProductConfig<D, kTile, BFloat16Pair> {
  // 32 KB of x for a full group. Sums go to memory and back once a chunk, which takes as long as 32 inputs.
  static constexpr int chunk_inputs = 256;
  static constexpr bool by_token = true;
};

inline TileShapes product_shapes(int block) {
  const int columns = least(block, kTileRows), depth = least(block, kTileDepth);
  TileShapes shapes;
  for (int i = 0; i < 4; ++i) shapes.set(i, kTileRows, columns * 4);
  for (int i = 4; i < 6; ++i) shapes.set(i, kTileRows, depth * 2);
  for (int i = 6; i < 8; ++i) shapes.set(i, depth / 2, columns * 4);
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

// What the tiles of a strip are taken from.
struct TileStrip {
  const BFloat16* x;      // of the first vector
  int64_t x_vector;       // to the next one
  const BFloat16Pair* w;  // [chunk][b / 2][width]
  int width;              // outputs
  float* sums;            // of the first vector
};

// sums [V * 16 tokens][O * 16 outputs] (+)= x W^T over a chunk.
template <int V, int O>
void multiply_tiles(const ProductArgs& a, const Chunk& chunk, const TileStrip& s, bool first) {
  const int64_t b = a.block, sum_row = b * 4, sum_vector = kTileRows * b;
  for_tiles<V * O>([&]<int I>() __attribute__((always_inline)) {
    if (first) tile_zero<I>();
    else tile_load<I>(s.sums + I / O * sum_vector + I % O * kTileRows, sum_row);
  });
  const int depth = least(a.block, kTileDepth);
  for (int i = 0; i < chunk.count; ++i) {
    const BFloat16* x = s.x + chunk.refs[i].from * (kTileRows * b);
    const BFloat16Pair* w = s.w + i * (b / 2) * s.width;
    for (int k = 0; k < a.block; k += depth, x += depth, w += depth / 2 * s.width) {
      for_tiles<O>([&]<int J>() __attribute__((always_inline)) { tile_load<6 + J>(w + J * kTileRows, s.width * 4); });
      for_tiles<V>([&]<int I>() __attribute__((always_inline)) {
        tile_load<4 + I % 2>(x + I * s.x_vector, b * 2);
        for_tiles<O>([&]<int J>() __attribute__((always_inline)) { tile_multiply<I * O + J, 4 + I % 2, 6 + J>(); });
      });
    }
  }
  for_tiles<V * O>([&]<int I>() __attribute__((always_inline)) {
    tile_store<I>(s.sums + I / O * sum_vector + I % O * kTileRows, sum_row);
  });
}

inline void multiply_strip(const ProductArgs& a, const Chunk& chunk, TileStrip s, int vectors, bool first) {
  auto take = [&]<int V, int O>() {
    multiply_tiles<V, O>(a, chunk, s, first);
    vectors -= V;
    s.x += V * s.x_vector;
    s.sums += int64_t{V} * kTileRows * a.block;
  };
  while (vectors > 0) {
    if (a.block >= kTileStrip) {
      if (vectors >= 2) take.template operator()<2, 2>();
      else take.template operator()<1, 2>();
    } else {
      if (vectors >= 4) take.template operator()<4, 1>();
      else if (vectors >= 2) take.template operator()<2, 1>();
      else take.template operator()<1, 1>();
    }
  }
}

// copy[k / 2][o] = (W(strip + o, k), W(strip + o, k + 1)) of a block whose rows are inputs (dgrad).
template <int Q>
void pair_inputs(const BFloat16* w, int block, int depth, int width, BFloat16Pair* copy) {
  for (int k = 0; k < block; k += 2, w += 2 * block, copy += width) {
    for (int o = 0; o < width; o += Q) {
      const Vec<uint32_t, Q> pairs = pair_rows<Q>(k < depth ? w + o : nullptr, k + 1 < depth ? w + block + o : nullptr);
      store_as<uint32_t, Q>(reinterpret_cast<uint32_t*>(copy + o), pairs);
    }
  }
}

// The same of a block whose rows are outputs (fprop). What lies beyond the last input may be anything.
template <int Q>
void transpose_inputs(const BFloat16* w, int block, int depth, int width, BFloat16Pair* copy) {
  for (int o = 0; o < width; o += Q) {
    for (int k = 0; k < block; k += 2 * Q) {
      transpose_pairs<Q>([&](int r) { return w + (o + r) * block + k; }, copy + k / 2 * width + o, width);
    }
  }
  for (int k = depth / 2 * 2; k < block; k += 2) {
    for (int o = 0; o < width; ++o) {
      BFloat16Pair& pair = copy[k / 2 * width + o];
      pair = {k < depth ? pair.first : uint16_t{0}, 0};
    }
  }
}

inline void copy_for_tiles(const ProductArgs& a, const BlockRef& ref, int strip, int width, BFloat16Pair* copy) {
  const int b = a.block;
  const int depth = static_cast<int>(least<int64_t>(b, a.inputs - static_cast<int64_t>(ref.from) * b));
  const auto* w = static_cast<const BFloat16*>(a.w) + static_cast<int64_t>(ref.weight) * b * b;
  if (a.by_in) {
    if (b >= 16) pair_inputs<16>(w + strip, b, depth, width, copy);
    else pair_inputs<8>(w + strip, b, depth, width, copy);
  } else {
    w += strip * b;
    if (b >= 32) transpose_inputs<16>(w, b, depth, width, copy);
    else if (b == 16) transpose_inputs<8>(w, b, depth, width, copy);
    else transpose_inputs<4>(w, b, depth, width, copy);
  }
}

template <class C>
void multiply_chunk_by_tiles(const ProductArgs& a, const Chunk& chunk, const Chunk& next, const BFloat16* x,
                             int64_t x_vector, int vectors, float* sums, bool first) {
  alignas(64) BFloat16Pair copy[C::chunk_inputs / 2 * kTileStrip];
  const int width = least(a.block, kTileStrip);
  for (int strip = 0; strip < a.block; strip += width) {
    for (int i = 0; i < chunk.count; ++i) {
      copy_for_tiles(a, chunk.refs[i], strip, width, copy + i * (a.block / 2) * width);
    }
    prefetch_strip<C>(a, next, strip);
    multiply_strip(a, chunk, {x, x_vector, copy, width, sums + strip}, vectors, first);
  }
}

inline int64_t panel_features(const ProductArgs& a) { return (a.inputs + a.block - 1) / a.block * a.block; }

template <class C>
void multiply_by_tiles(const ProductArgs& a, int64_t piece, int64_t first_vector, int64_t last_vector) {
  const int64_t x_vector = kTileRows * panel_features(a);
  tile_configure(product_shapes(a.block));
  for (int64_t v = first_vector; v < last_vector; v += C::group) {
    alignas(64) float sums[C::group * kTileRows * kMaxBlock];
    const int vectors = static_cast<int>(least<int64_t>(C::group, last_vector - v));
    const auto* x = static_cast<const BFloat16*>(a.panels) + v * x_vector;
    sum_chunks<C>(a, a.pieces[piece], vectors, sums, [&](const Chunk& chunk, const Chunk& next, float* to, bool first) {
      multiply_chunk_by_tiles<C>(a, chunk, next, x, x_vector, vectors, to, first);
    });
    deliver<C>(a, a.pieces[piece], v, vectors, sums);
  }
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

template <class C>
void pack_for_tiles(const ProductArgs& a, int64_t vector, int64_t first_feature, int64_t last_feature) {
  const int64_t token = vector * kTileRows, tokens = least<int64_t>(kTileRows, a.n - token);
  for (int64_t feature = first_feature; feature < last_feature; feature += a.block) {
    const int64_t features = least<int64_t>(a.block, last_feature - feature);
    const auto* x = static_cast<const BFloat16*>(a.x) + token * a.x_token + feature * a.x_feature;
    BFloat16* to = static_cast<BFloat16*>(a.panels) + vector * kTileRows * panel_features(a) + feature * kTileRows;
    int64_t stride = a.x_feature;
    const bool whole = tokens == kTileRows && features == a.block;
    if (a.x_feature == 1) {
      if (!whole) __builtin_memset(to, 0, sizeof(BFloat16) * static_cast<size_t>(kTileRows * a.block));
      const size_t bytes = sizeof(BFloat16) * static_cast<size_t>(features);
      for (int64_t t = 0; t < tokens; ++t) __builtin_memcpy(to + t * a.block, x + t * a.x_token, bytes);
      continue;
    }
    BFloat16 padded[kMaxBlock * kTileRows];
    if (!whole) {
      __builtin_memset(padded, 0, sizeof(padded));
      for (int64_t f = 0; f < features; ++f) {
        for (int64_t t = 0; t < tokens; ++t) padded[f * kTileRows + t] = x[f * a.x_feature + t];
      }
      x = padded;
      stride = kTileRows;
    }
    if (a.block >= 32) transpose_tokens<16>(x, stride, a.block, to);
    else if (a.block == 16) transpose_tokens<8>(x, stride, a.block, to);
    else transpose_tokens<4>(x, stride, a.block, to);
  }
}

template <class C>
ProductKernel make_tile_product(Isa isa) {
  return {isa,        C::dtype, C::tile,       C::lanes, pack_for_tiles<C>, multiply_by_tiles<C>,
          combine<C>, few<C>,   combine_few<C>};
}

}  // namespace
}  // namespace blocksparse::linear
