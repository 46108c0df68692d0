// dW[block] (+)= gate * dy_out^T x_in by AMX, bf16, and the gradient of the gates.
//   x panels [in blocks][round][b], two tokens in a row, and dy panels alike     sums in tiles over a whole round
// Who does what
//   pack      as in gradient.h; zeros up to whole tiles of 32 tokens
//   multiply  a run of blocks. Blocks of one row share dy, so their columns are treated as one list of vectors:
//               for each strip of up to 32 rows: dy is transposed once for the whole list, [tiles of tokens][rows][32]
//                 for each 2 x 2 tiles (1 x 4 below 32 rows) of sums: over all tokens
//                   merge: gate, gradient of the gate, accumulate, narrow, store
#pragma once

#include "core/ceil_div.h"
#include "gemm/cpu/amx/product.h"
#include "gemm/cpu/gradient.h"

namespace blocksparse::gemm {
namespace {

constexpr int kTileStrip = 32;  // rows of dW

inline TileShapes gradient_shapes(int block) {
  const int side = least(block, kTileRows);
  TileShapes shapes;
  for (int i = 0; i < 4; ++i) shapes.set(i, side, side * 4);
  for (int i = 4; i < 6; ++i) shapes.set(i, side, kTileDepth * 2);      // dy
  for (int i = 6; i < 8; ++i) shapes.set(i, kTileDepth / 2, side * 4);  // x
  return shapes;
}

// strip[tile of tokens][row][16 pairs] of `rows` rows of dy, which is [pairs][b].
template <int Q>
void transpose_dy(const GradientArgs& a, const BFloat16Pair* dy, int rows, BFloat16Pair* strip) {
  const int64_t pairs = ceil_div(a.n, 2);
  for (int64_t k = 0; k < pairs; k += kPairsAtOnce, strip += rows * kPairsAtOnce) {
    for (int64_t p = 0; p < kPairsAtOnce; p += Q) {
      for (int o = 0; o < rows; o += Q) {
        auto pair = [&](int r) __attribute__((always_inline)) {
          return k + p + r < pairs ? load_pairs<Q>(dy + (k + p + r) * a.block + o) : Vec<uint32_t, Q>{};
        };
        transpose_pairs<Q>(pair, strip + o * kPairsAtOnce + p, kPairsAtOnce);
      }
    }
  }
}

// sums [V][O * side rows][side] = dy^T x over all tokens.
template <int O, int V>
void gradient_tiles(const GradientArgs& a, const BFloat16Pair* dy, const BFloat16Pair* const* x, float* sums) {
  const int side = least(a.block, kTileRows);
  const int64_t pairs = ceil_div(a.n, 2), tile = int64_t{side} * kPairsAtOnce;
  for_tiles<O * V>([]<int I>() __attribute__((always_inline)) { tile_zero<I>(); });
  for (int64_t k = 0; k < pairs; k += kPairsAtOnce, dy += O * tile) {
    for_tiles<O>([&]<int J>() __attribute__((always_inline)) { tile_load<4 + J>(dy + J * tile, 64); });
    for_tiles<V>([&]<int I>() __attribute__((always_inline)) {
      tile_load<6 + I % 2>(x[I] + k * a.block, a.block * 4);
      for_tiles<O>([&]<int J>() __attribute__((always_inline)) { tile_multiply<I * O + J, 4 + J, 6 + I % 2>(); });
    });
  }
  for_tiles<O * V>([&]<int I>() __attribute__((always_inline)) { tile_store<I>(sums + I * side * side, side * 4); });
}

// Asks for the first tokens of the V runs of columns that come next.
template <int L, int V>
BS_INLINE void prefetch_columns(const GradientArgs& a, Columns next, int64_t last_block) {
  constexpr int64_t kTokens = 128;
  for (int v = 0; v < V && next.block < last_block; ++v) {
    const auto* x = static_cast<const BFloat16Pair*>(a.x_panels) + a.refs[next.block].from * a.round * a.block;
    for (int64_t t = 0; t < least(a.n, kTokens); t += 2) __builtin_prefetch(x + t / 2 * a.block + next.column);
    next.column += L;
    if (next.column == a.block) next = {next.block + 1, 0, 0};
  }
}

// One strip of rows of one row of blocks. L: columns of a tile, O: tiles of rows, V: of columns.
template <class C, int L, int O, int V>
void gradient_strip(const GradientArgs& a, int64_t out, int64_t first_block, int64_t last_block, int row,
                    const BFloat16Pair* dy) {
  constexpr int kRows = O * L;
  Columns next{first_block, 0, 0}, columns[V];
  for (int64_t left = (last_block - first_block) * (a.block / L); left > 0;) {
    const int take = static_cast<int>(least<int64_t>(V, left));
    const BFloat16Pair* x[V];
    for (int v = 0; v < V; ++v) {
      if (v < take) {
        next.in = a.refs[next.block].from;
        columns[v] = next;
        next.column += L;
        if (next.column == a.block) next = {next.block + 1, 0, 0};
      } else {
        columns[v] = columns[0];  // not used
      }
      x[v] = static_cast<const BFloat16Pair*>(a.x_panels) + columns[v].in * a.round * a.block + columns[v].column;
    }
    prefetch_columns<L, V>(a, next, last_block);
    alignas(64) float sums[V * kRows * L];
    if (take > V / 2) gradient_tiles<O, V>(a, dy, x, sums);
    else gradient_tiles<O, V / 2>(a, dy, x, sums);
    float gate_sums[V] = {};
    const bool plain = is_plain<C, L>(a, out, columns, take);
    store_sums<C, L, kRows>(a, out, columns, take, row, plain, sums, kRows * L, gate_sums);
    for (int v = 0; v < take && a.dgates != nullptr; ++v) {
      static_cast<float*>(a.dgates)[columns[v].block] += gate_sums[v];
    }
    left -= take;
  }
}

template <class C>
void gradient_row_by_tiles(const GradientArgs& a, int64_t out, int64_t first_block, int64_t last_block) {
  alignas(64) BFloat16Pair strip[kMostRoundTokens / 2 * kTileStrip];
  const auto* dy = static_cast<const BFloat16Pair*>(a.dy_panels) + out * a.round * a.block;
  for (int row = 0; row < a.block; row += kTileStrip) {
    if (a.block >= 32) {
      transpose_dy<16>(a, dy + row, 32, strip);
      gradient_strip<C, 16, 2, 2>(a, out, first_block, last_block, row, strip);
    } else if (a.block == 16) {
      transpose_dy<16>(a, dy, 16, strip);
      gradient_strip<C, 16, 1, 4>(a, out, first_block, last_block, 0, strip);
    } else {
      transpose_dy<8>(a, dy, 8, strip);
      gradient_strip<C, 8, 1, 4>(a, out, first_block, last_block, 0, strip);
    }
  }
}

template <class C>
void gradient_by_tiles(const GradientArgs& a, int64_t first_block, int64_t last_block) {
  tile_configure(gradient_shapes(a.block));
  gradient_rows<C>(a, first_block, last_block,
                   [&](int64_t out, int64_t first, int64_t last) { gradient_row_by_tiles<C>(a, out, first, last); });
  tile_release();
}

template <class C>
GradientKernel make_tile_gradient(Isa isa) {
  return {isa, C::dtype, C::tile, C::lanes, pack_for_gradient<C>, gradient_by_tiles<C>};
}

}  // namespace
}  // namespace blocksparse::gemm
