// dgrad by AMX: tokens are the tiles' rows. W is walked by its columns, and its rows are paired.
//   x panels [vectors][blocks][16 tokens][b]     sums [vectors][16 tokens][b]
// For each chunk of a piece's list, whose x stays in L1, for each strip of 16 outputs: sums of four vectors stay in
// tiles over the chunk. W is copied as [pairs of inputs][outputs][2] two steps of 32 inputs ahead, while the tiles
// multiply an earlier copy. ("Inputs" are those of the pass: features of dy.)
#pragma once

#include "gemm/cpu/amx/common.h"

namespace blocksparse::gemm {
namespace {

// Tiles 0 to 3 are sums, 4 and 5 x, 6 and 7 W.
inline TileShapes backward_shapes(int block) {
  const int columns = least(block, kTileRows), depth = least(block, kTileDepth);
  TileShapes shapes;
  for (int i = 0; i < 4; ++i) shapes.set(i, kTileRows, columns * 4);
  for (int i = 4; i < 6; ++i) shapes.set(i, kTileRows, depth * 2);
  for (int i = 6; i < 8; ++i) shapes.set(i, depth / 2, columns * 4);
  return shapes;
}

// copy[k / 2][o] = (W(k, o), W(k + 1, o)) for O outputs and K inputs. Inputs from `depth` on do not exist and become 0.
// Not inlined: one copy serves any number of vectors.
template <int O, int K>
__attribute__((noinline)) void copy_in_pairs(const BFloat16* w, int block, int64_t depth, BFloat16Pair* copy) {
  if (depth >= K) {
#pragma GCC unroll 16
    for (int k = 0; k < K; k += 2, w += 2 * block) store_pairs<O>(copy + k / 2 * O, pair_rows<O>(w, w + block));
    return;
  }
  for (int64_t k = 0; k < K; k += 2, w += 2 * block) {
    for (int64_t o = 0; o < O; ++o) {
      copy[k / 2 * O + o] = {k < depth ? w[o].bits : uint16_t{0}, k + 1 < depth ? w[block + o].bits : uint16_t{0}};
    }
  }
}

// What a strip multiplies: x and sums of the first vector. Those of the next vectors are `x_vector` and 16 b further.
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
void multiply_backward(const ProductArgs& a, const Chunk& chunk, const TileStrip& s, bool first) {
  constexpr int kAhead = 2, kCopies = 4;  // a load then never waits for the stores of a copy that was just made
  alignas(64) BFloat16Pair copies[kCopies][K / 2 * O];
  const int64_t b = a.block, sum_row = b * 4, sum_vector = kTileRows * b, x_vector = s.x_vector;
  const int shift = __builtin_ctz(static_cast<unsigned>(a.block / K)), steps = chunk.count << shift;  // of a block
  const auto in_block = [&](int step) __attribute__((always_inline)) { return (step & ((1 << shift) - 1)) * K; };
  const auto copy = [&](int step) __attribute__((always_inline)) {
    const BlockRef& ref = chunk.refs[step >> shift];
    const int64_t k = in_block(step);
    copy_in_pairs<O, K>(static_cast<const BFloat16*>(a.w) + (ref.weight * b + k) * b + s.strip, a.block,
                        a.inputs - ref.from * b - k, copies[step % kCopies]);
  };
  const auto x_of = [&](int step) __attribute__((always_inline)) {
    return s.x + chunk.refs[step >> shift].from * (kTileRows * b) + in_block(step);
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
void multiply_strip_backward(const ProductArgs& a, const Chunk& chunk, const TileStrip& s, int vectors, bool first) {
  switch (vectors) {
    case 1: return multiply_backward<1, O, K>(a, chunk, s, first);
    case 2: return multiply_backward<2, O, K>(a, chunk, s, first);
    case 3: return multiply_backward<3, O, K>(a, chunk, s, first);
    default: return multiply_backward<4, O, K>(a, chunk, s, first);
  }
}

template <class C>
void multiply_chunk_backward(const ProductArgs& a, const Chunk& chunk, Ahead<C>* ahead, const BFloat16* x,
                             int64_t x_vector, int vectors, float* sums, bool first) {
  static_assert(C::group <= C::tile.vectors);
  const char* later[kMostOfChunk];
  const int asking = ahead != nullptr ? chunk.count : 0;
  for (int i = 0; i < asking; ++i) later[i] = ahead->next();
  for (int strip = 0; strip < a.block; strip += kTileRows) {
    for (int i = 0; i < asking; ++i) Ahead<C>::ask(later[i], bytes_of_strip<C>(a, strip));
    const TileStrip s{x, x_vector, sums + strip, strip};
    if (a.block >= 32) multiply_strip_backward<16, 32>(a, chunk, s, vectors, first);
    else if (a.block == 16) multiply_strip_backward<16, 16>(a, chunk, s, vectors, first);
    else multiply_strip_backward<8, 8>(a, chunk, s, vectors, first);
  }
}

// ---- 64 tokens and more: a chunk of W is copied once for all of them ------------------------------------------------

// A copied chunk of W, [steps][strips][16 pairs][16 outputs], and where x of each step begins.
struct CopiedChunk {
  static constexpr int kPairs = kTileDepth / 2 * kTileRows;
  alignas(64) BFloat16Pair w[256 * kMaxBlock / 2];
  int64_t x[256 / kTileDepth];
  int steps, strips;
};

template <class C>
void copy_chunk(const ProductArgs& a, const Chunk& chunk, Ahead<C>* ahead, CopiedChunk& to) {
  const int64_t b = a.block;
  to.steps = 0, to.strips = a.block / kTileRows;
  BFloat16Pair* copy = to.w;
  for (int i = 0; i < chunk.count; ++i) {
    const BlockRef& ref = chunk.refs[i];
    if (ahead != nullptr) Ahead<C>::ask(ahead->next(), {0, b * b * static_cast<int64_t>(sizeof(BFloat16))});
    for (int64_t k = 0; k < b; k += kTileDepth) {
      to.x[to.steps++] = ref.from * (kTileRows * b) + k;
      const auto* w = static_cast<const BFloat16*>(a.w) + (ref.weight * b + k) * b;
      for (int64_t strip = 0; strip < b; strip += kTileRows, copy += CopiedChunk::kPairs) {
        copy_in_pairs<kTileRows, kTileDepth>(w + strip, a.block, a.inputs - ref.from * b - k, copy);
      }
    }
  }
}

// sums [V * 16 tokens][32 outputs] (+)= x W^T. Tiles 0 to 3 are sums [vector][strip], 4 and 5 x, 6 and 7 W.
template <int V>
void multiply_copied(int64_t block, const CopiedChunk& chunk, const TileStrip& s, bool first) {
  const int64_t row = block * 4, vector = kTileRows * block, w_step = int64_t{chunk.strips} * CopiedChunk::kPairs;
  for_tiles<2 * V>([&]<int I>() __attribute__((always_inline)) {
    if (first) tile_zero<I>();
    else tile_load<I>(s.sums + I / 2 * vector + I % 2 * kTileRows, row);
  });
  const BFloat16Pair* w = chunk.w + s.strip / kTileRows * CopiedChunk::kPairs;
  for (int step = 0; step < chunk.steps; ++step, w += w_step) {
    const BFloat16* x = s.x + chunk.x[step];
    tile_load<6>(w, kTileRows * 4);
    tile_load<7>(w + CopiedChunk::kPairs, kTileRows * 4);
    for_tiles<V>([&]<int I>() __attribute__((always_inline)) {
      tile_load<4 + I>(x + I * s.x_vector, block * 2);
      tile_multiply<2 * I, 4 + I, 6>();
      tile_multiply<2 * I + 1, 4 + I, 7>();
    });
  }
  for_tiles<2 * V>(
      [&]<int I>() __attribute__((always_inline)) { tile_store<I>(s.sums + I / 2 * vector + I % 2 * kTileRows, row); });
}

inline void multiply_squares(int64_t block, const CopiedChunk& chunk, int vectors, const BFloat16* x, int64_t x_vector,
                             float* sums, bool first) {
  for (int v = 0; v < vectors; v += 2, x += 2 * x_vector, sums += 2 * kTileRows * block) {
    for (int strip = 0; strip < block; strip += 2 * kTileRows) {
      const TileStrip s{x, x_vector, sums + strip, strip};
      if (v + 1 < vectors) multiply_copied<2>(block, chunk, s, first);
      else multiply_copied<1>(block, chunk, s, first);
    }
  }
}

constexpr int kBackwardSums = 32 * 1024 / 4;
constexpr int kLeastCopied = 4;  // vectors; with two, b = 32 and 64 at 50 % take 1.25 to 1.4 times as long

// For W without gates.
template <class C>
void multiply_piece_copied(const ProductArgs& a, const Piece& piece, Ahead<C>& ahead, Range range) {
  const int64_t b = a.block, x_vector = kTileRows * panel_features(a), most = kBackwardSums / (kTileRows * b);
  for (int64_t v = range.first; v < range.last; v += most) {
    alignas(64) float sums[kBackwardSums];
    const int vectors = static_cast<int>(least<int64_t>(most, range.last - v));
    const BFloat16* x = panel_of(a, v);
    bool first = true;
    for (int32_t next = piece.first; next < piece.last || first; first = false) {
      const Chunk chunk{a.refs + next, least(most_of_chunk<C>(a), piece.last - next)};
      next += chunk.count;
      CopiedChunk copied;
      copy_chunk<C>(a, chunk, v == range.first ? &ahead : nullptr, copied);
      multiply_squares(b, copied, vectors, x, x_vector, sums, first);
    }
    deliver<C>(a, piece, v, vectors, sums);
  }
}

template <class C>
void multiply_piece_backward(const ProductArgs& a, const Piece& piece, Ahead<C>& ahead, Range range) {
  if (a.block >= kTileDepth && a.gates == nullptr && range.last - range.first >= kLeastCopied) {
    return multiply_piece_copied<C>(a, piece, ahead, range);
  }
  const int64_t x_vector = kTileRows * panel_features(a);
  for (int64_t v = range.first; v < range.last; v += C::group) {
    alignas(64) float sums[C::group * kTileRows * kMaxBlock];
    const int vectors = static_cast<int>(least<int64_t>(C::group, range.last - v));
    const BFloat16* x = panel_of(a, v);
    Ahead<C>* asks = v == range.first ? &ahead : nullptr;
    sum_chunks<C>(a, piece, vectors, sums, [&](const Chunk& chunk, float* to, bool first, bool) {
      multiply_chunk_backward<C>(a, chunk, asks, x, x_vector, vectors, to, first);
    });
    deliver<C>(a, piece, v, vectors, sums);
  }
}

// Transposes [features][16 tokens] to [16 tokens][block].
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

// Copies rows of tokens, Q features at a time. Missing tokens are zeros.
template <int Q>
void copy_tokens(const ProductArgs& a, const BFloat16* x, int64_t tokens, int64_t features, BFloat16* to) {
  for (int64_t t = 0; t < kTileRows; ++t, x += a.x_token) {
    BFloat16* row = to + t * a.block;
    for (int64_t f = 0; f < features; f += a.block, row += kTileRows * a.block) {
      for (int i = 0; i < a.block; i += Q) {
        if (t < tokens) __builtin_memcpy(row + i, x + f + i, sizeof(BFloat16) * Q);
        else __builtin_memset(row + i, 0, sizeof(BFloat16) * Q);
      }
    }
  }
}

// An incomplete block.
inline void pack_part(const ProductArgs& a, const BFloat16* x, int64_t tokens, int64_t features, BFloat16* to) {
  for (int64_t t = 0; t < kTileRows; ++t) {
    for (int64_t f = 0; f < a.block; ++f) {
      to[t * a.block + f] = t < tokens && f < features ? x[t * a.x_token + f * a.x_feature] : BFloat16{0};
    }
  }
}

inline void pack_backward(const ProductArgs& a, int64_t vector, int64_t first_feature, int64_t last_feature) {
  const int64_t token = vector * kTileRows, tokens = least<int64_t>(kTileRows, a.n - token), b = a.block;
  const auto* x = static_cast<const BFloat16*>(a.x) + token * a.x_token;
  BFloat16* panel = panel_of(a, vector);
  const int64_t whole = a.x_feature != 1 && tokens < kTileRows ? first_feature : last_feature / b * b;
  if (a.x_feature == 1) {
    BFloat16* to = panel + first_feature * kTileRows;
    if (b >= 32) copy_tokens<32>(a, x + first_feature, tokens, whole - first_feature, to);
    else if (b == 16) copy_tokens<16>(a, x + first_feature, tokens, whole - first_feature, to);
    else copy_tokens<8>(a, x + first_feature, tokens, whole - first_feature, to);
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

}  // namespace
}  // namespace blocksparse::gemm
