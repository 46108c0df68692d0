// fprop by AMX: W is read in place, and its rows are the tiles' rows.
//   x panels [vectors][blocks][b / 2 pairs of inputs][16 tokens][2]   sums [vectors][b / 16][16 outputs][16 tokens]
// For each chunk of a piece's list, whose W stays in L1: for two vectors and two strips of 16 outputs (blocks of 8 and
// 16: for four vectors), sums stay in tiles over the chunk. After the last chunk sums are transposed for the finish.
// Copying W in pairs, with tokens as rows as in dgrad, took 1.5 to 2 times as long: 16 loads, 64 shuffles and 16 stores
// for every four products of 64 tokens.
#pragma once

#include <immintrin.h>

#include "gemm/cpu/amx/common.h"

namespace blocksparse::gemm {
namespace {

// Tiles 0 to 3 are sums, 4 and 5 x, 6 and 7 W.
inline TileShapes forward_shapes(int block) {
  const int outputs = least(block, kTileRows), depth = least(block, kTileDepth);
  TileShapes shapes;
  for (int i = 0; i < 4; ++i) shapes.set(i, outputs, kTileRows * 4);
  for (int i = 4; i < 6; ++i) shapes.set(i, depth / 2, kTileRows * 4);
  for (int i = 6; i < 8; ++i) shapes.set(i, outputs, depth * 2);
  return shapes;
}

// The blocks of W of a chunk, and where x of each begins.
struct ForwardChunk {
  const BFloat16* w[kMostOfChunk];
  int64_t x[kMostOfChunk];
  int count;
};

// x and sums of the first vector. Those of the next vectors are `x_vector` and 16 b further.
struct ForwardTiles {
  const BFloat16* x;
  int64_t x_vector;
  float* sums;
  bool first;  // sums begin at 0
};

// sums of V vectors and S strips (+)= W x^T, K inputs at a time.
template <int V, int S, int K>
void multiply_forward(int64_t block, const ForwardChunk& chunk, int strip, const ForwardTiles& t) {
  constexpr int64_t kStripSums = kTileRows * kTileRows;
  const int64_t vector = kTileRows * block, w_row = block * 2;
  float* sums = t.sums + strip * kTileRows;
  for_tiles<V * S>([&]<int I>() __attribute__((always_inline)) {
    if (t.first) tile_zero<I>();
    else tile_load<I>(sums + I / S * vector + I % S * kStripSums, kTileRows * 4);
  });
  for (int i = 0; i < chunk.count; ++i) {
    const BFloat16 *w = chunk.w[i] + strip * block, *x = t.x + chunk.x[i];
    for (int64_t k = 0; k < block; k += K, w += K, x += K * kTileRows) {
      tile_load<6>(w, w_row);
      if constexpr (S == 2) tile_load<7>(w + kTileRows * block, w_row);
      for_tiles<V>([&]<int I>() __attribute__((always_inline)) {
        tile_load<4 + I % 2>(x + I * t.x_vector, kTileRows * 4);
        tile_multiply<S * I, 6, 4 + I % 2>();
        if constexpr (S == 2) tile_multiply<S * I + 1, 7, 4 + I % 2>();
      });
    }
  }
  for_tiles<V * S>([&]<int I>() __attribute__((always_inline)) {
    tile_store<I>(sums + I / S * vector + I % S * kStripSums, kTileRows * 4);
  });
}

template <int B>
void multiply_forward_small(const ForwardChunk& chunk, int vectors, ForwardTiles t) {
  for (int v = 0; v < vectors; v += 4, t.x += 4 * t.x_vector, t.sums += 4 * kTileRows * B) {
    switch (vectors - v) {
      case 1: multiply_forward<1, 1, B>(B, chunk, 0, t); break;
      case 2: multiply_forward<2, 1, B>(B, chunk, 0, t); break;
      case 3: multiply_forward<3, 1, B>(B, chunk, 0, t); break;
      default: multiply_forward<4, 1, B>(B, chunk, 0, t);
    }
  }
}

inline void multiply_forward_large(int64_t block, const ForwardChunk& chunk, int vectors, ForwardTiles t) {
  for (int v = 0; v < vectors; v += 2, t.x += 2 * t.x_vector, t.sums += 2 * kTileRows * block) {
    for (int strip = 0; strip < block; strip += 2 * kTileRows) {
      if (v + 1 < vectors) multiply_forward<2, 2, kTileDepth>(block, chunk, strip, t);
      else multiply_forward<1, 2, kTileDepth>(block, chunk, strip, t);
    }
  }
}

// Transposes 16 rows of 16 words of 32 bits.
BS_INLINE void turn_words(const void* from, int64_t from_row, void* to, int64_t to_row) {
  const auto store = [&](int row, auto words) __attribute__((always_inline)) {
    __builtin_memcpy(static_cast<char*>(to) + row * to_row, &words, sizeof(words));
  };
#if defined(__AVX512F__)
  // Quarters of rows are brought together by loads, which leaves half of the shuffles: 32, on the one port that does
  // them.
  const auto quarter = [&](int row, int c) __attribute__((always_inline)) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const char*>(from) + row * from_row) + c);
  };
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    __m512i rows[4];  // r, r + 4, r + 8, r + 12
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      rows[r] = _mm512_maskz_broadcast_i32x4(0x000f, quarter(r, c));
      rows[r] = _mm512_mask_broadcast_i32x4(rows[r], 0x00f0, quarter(r + 4, c));
      rows[r] = _mm512_mask_broadcast_i32x4(rows[r], 0x0f00, quarter(r + 8, c));
      rows[r] = _mm512_mask_broadcast_i32x4(rows[r], 0xf000, quarter(r + 12, c));
    }
    const __m512i low = _mm512_maskz_unpacklo_epi32(0xffff, rows[0], rows[1]);
    const __m512i high = _mm512_maskz_unpackhi_epi32(0xffff, rows[0], rows[1]);
    const __m512i low_too = _mm512_maskz_unpacklo_epi32(0xffff, rows[2], rows[3]);
    const __m512i high_too = _mm512_maskz_unpackhi_epi32(0xffff, rows[2], rows[3]);
    store(4 * c, _mm512_maskz_unpacklo_epi64(0xff, low, low_too));
    store(4 * c + 1, _mm512_maskz_unpackhi_epi64(0xff, low, low_too));
    store(4 * c + 2, _mm512_maskz_unpacklo_epi64(0xff, high, high_too));
    store(4 * c + 3, _mm512_maskz_unpackhi_epi64(0xff, high, high_too));
  }
#else
  Vec<uint32_t, 16> square[16];
  for (int r = 0; r < 16; ++r) {
    square[r] = load_as<uint32_t, 16>(reinterpret_cast<const uint32_t*>(static_cast<const char*>(from) + r * from_row));
  }
  transpose<uint32_t, 16>(square);
  for (int r = 0; r < 16; ++r) store(r, square[r]);
#endif
}

// Transposes [b / 16][16 outputs][16 tokens] of a vector to [16 tokens][b].
inline void turn_sums(const float* sums, int block, float* to) {
  if (block == 8) {
    for (int t = 0; t < kTileRows; t += 8) {
      Vec<float, 8> square[8];
#pragma GCC unroll 8
      for (int o = 0; o < 8; ++o) square[o] = load_as<float, 8>(sums + o * kTileRows + t);
      transpose<float, 8>(square);
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) store_as<float, 8>(to + (t + r) * 8, square[r]);
    }
    return;
  }
  for (int strip = 0; strip < block; strip += kTileRows, sums += kTileRows * kTileRows) {
    turn_words(sums, kTileRows * 4, to + strip, block * 4);
  }
}

// Brings sums [b][16 tokens] of a whole list or a slice to their destination.
template <class C>
void deliver_forward(const ProductArgs& a, const Piece& piece, int64_t vector, const float* sums) {
  if (piece.slot < 0 && a.y_token == 1 && (a.residual == nullptr || a.residual_token == 1)) {
    const int64_t token = vector * kTileRows;
    return finish_by_feature<C>(a, Place<C>(a, piece.to, token), least<int64_t>(kTileRows, a.n - token), sums);
  }
  alignas(64) float turned[kTileRows * kMaxBlock];
  turn_sums(sums, a.block, turned);
  deliver<C>(a, piece, vector, 1, turned);
}

// Finds the blocks of a chunk. A block with inputs beyond the matrix is copied to `whole`, because W may hold anything
// there.
template <class C>
void find_blocks(const ProductArgs& a, const Chunk& chunk, Ahead<C>* ahead, BFloat16* whole, ForwardChunk& to) {
  const int64_t b = a.block, last = (a.inputs - 1) / b, inside = a.inputs - last * b;
  // The hardware prefetches larger blocks, which follow one another in a row. Without asking, b = 32 takes 55 us
  // instead of 68 in cache, and 0.97x the time from memory.
  const bool asks = ahead != nullptr && b < kTileDepth;
  to.count = chunk.count;
  for (int i = 0; i < chunk.count; ++i) {
    const BlockRef& ref = chunk.refs[i];
    if (asks) Ahead<C>::ask(ahead->next(), {0, b * b * static_cast<int64_t>(sizeof(BFloat16))});
    to.w[i] = static_cast<const BFloat16*>(a.w) + ref.weight * b * b;
    to.x[i] = ref.from * kTileRows * b;
    if (ref.from != last || inside == b) continue;
    __builtin_memset(whole, 0, sizeof(BFloat16) * static_cast<size_t>(b * b));
    for (int64_t o = 0; o < b; ++o) {
      __builtin_memcpy(whole + o * b, to.w[i] + o * b, sizeof(BFloat16) * static_cast<size_t>(inside));
    }
    to.w[i] = whole;
  }
}

constexpr int kForwardSums = 32 * 1024 / 4;  // sums of the vectors that share a chunk of W in L1

template <class C>
void multiply_piece_forward(const ProductArgs& a, const Piece& piece, Ahead<C>& ahead, Range range) {
  static_assert(C::group * kTileRows * kMaxBlock <= kForwardSums);
  alignas(64) float sums[kForwardSums];
  alignas(64) BFloat16 whole[kMaxBlock * kMaxBlock];
  const int64_t b = a.block, x_vector = kTileRows * panel_features(a);
  const int64_t most = a.gates != nullptr ? C::group : kForwardSums / (kTileRows * b);
  for (int64_t v = range.first; v < range.last; v += most) {
    const int vectors = static_cast<int>(least<int64_t>(most, range.last - v));
    const BFloat16* x = panel_of(a, v);
    sum_chunks<C>(a, piece, vectors, sums, [&](const Chunk& chunk, float* to, bool first, bool) {
      ForwardChunk blocks;
      find_blocks<C>(a, chunk, v == range.first ? &ahead : nullptr, whole, blocks);
      const ForwardTiles t{x, x_vector, to, first};
      if (b >= kTileDepth) multiply_forward_large(b, blocks, vectors, t);
      else if (b == 16) multiply_forward_small<16>(blocks, vectors, t);
      else multiply_forward_small<8>(blocks, vectors, t);
    });
    for (int i = 0; i < vectors; ++i) deliver_forward<C>(a, piece, v + i, sums + i * kTileRows * b);
  }
}

// x of 16 tokens as pairs of inputs. Missing tokens are zeros.
template <int Q, bool kWhole>
void pair_tokens(const ProductArgs& a, const BFloat16* x, int64_t tokens, int64_t features, BFloat16* to) {
  auto* pairs = reinterpret_cast<BFloat16Pair*>(to);
  for (int64_t f = 0; f < features; f += 2 * Q, pairs += Q * kTileRows) {
    if constexpr (kWhole && Q == kTileRows) {
      turn_words(x + f, a.x_token * 2, pairs, kTileRows * 4);
      continue;
    }
    for (int64_t t = 0; t < kTileRows; t += Q) {
      transpose_pairs<Q>(
          [&](int r) __attribute__((always_inline)) {
            return kWhole || t + r < tokens ? load_pairs<Q>(x + (t + r) * a.x_token + f) : Vec<uint32_t, Q>{};
          },
          pairs + t, kTileRows);
    }
  }
}

inline void pair_features(const ProductArgs& a, const BFloat16* x, int64_t features, BFloat16* to) {
  for (int64_t f = 0; f < features; f += 2, to += 2 * kTileRows, x += 2 * a.x_feature) {
    store_pairs<kTileRows>(reinterpret_cast<BFloat16Pair*>(to), pair_rows<kTileRows>(x, x + a.x_feature));
  }
}

// An incomplete part: missing features, or missing tokens of features-first x.
inline void pair_part(const ProductArgs& a, const BFloat16* x, int64_t tokens, int64_t features, BFloat16* to) {
  for (int64_t f = 0; f < a.block; ++f) {
    for (int64_t t = 0; t < kTileRows; ++t) {
      to[(f / 2 * kTileRows + t) * 2 + f % 2] =
          t < tokens && f < features ? x[t * a.x_token + f * a.x_feature] : BFloat16{0};
    }
  }
}

inline void pack_forward(const ProductArgs& a, int64_t vector, int64_t first_feature, int64_t last_feature) {
  const int64_t token = vector * kTileRows, tokens = least<int64_t>(kTileRows, a.n - token), b = a.block;
  const auto* x = static_cast<const BFloat16*>(a.x) + token * a.x_token;
  BFloat16* panel = panel_of(a, vector);
  const bool by_features = a.x_feature != 1;
  const int64_t whole = by_features && tokens < kTileRows ? first_feature : last_feature / b * b;
  const int64_t features = whole - first_feature;
  BFloat16* to = panel + first_feature * kTileRows;
  const BFloat16* from = x + first_feature * a.x_feature;
  const auto pair_all = [&]<int Q>() {
    if (tokens == kTileRows) pair_tokens<Q, true>(a, from, tokens, features, to);
    else pair_tokens<Q, false>(a, from, tokens, features, to);
  };
  if (by_features) pair_features(a, from, features, to);
  else if (b >= 32) pair_all.template operator()<16>();
  else if (b == 16) pair_all.template operator()<8>();
  else pair_all.template operator()<4>();
  for (int64_t feature = whole; feature < last_feature; feature += b) {
    pair_part(a, x + feature * a.x_feature, tokens, least(b, last_feature - feature), panel + feature * kTileRows);
  }
}

}  // namespace
}  // namespace blocksparse::gemm
