// y = f(x W^T + bias + residual) by AMX, bf16.
//   w [blocks, b, b]     sums [16 tokens][b] of each vector of 16 tokens, in tiles and L1
// W in place is a tile's first operand in fprop, which walks its rows (forward.h). In dgrad, which walks its columns, W
// is the second operand, copied in pairs (backward.h). x is packed accordingly.
#pragma once

#include "gemm/cpu/amx/backward.h"
#include "gemm/cpu/amx/forward.h"

namespace blocksparse::gemm {
namespace {

template <DType D, Tile kTile>
struct TilesConfig : ProductConfig<D, kTile, BFloat16Pair> {
  // 32 KB of x for a full group. Sums go to memory and back once a chunk, which takes as long as 32 inputs.
  static constexpr int chunk_inputs = 256, most_shared = kMaxBlock;
  static constexpr bool by_token = true;
  static_assert(kTile.outputs == kTileRows && kTile.vectors <= 4, "tiles 0 to 3 hold sums");
};

template <class C>
void multiply_by_tiles(const ProductArgs& a, Range pieces, Range vectors) {
  // Configuring and releasing tiles takes 74 ns, more than 8 products.
  tile_configure(a.by_in ? backward_shapes(a.block) : forward_shapes(a.block));
  Ahead<C> ahead(a, pieces);
  for (int64_t p = pieces.first; p < pieces.last; ++p) {
    if (a.by_in) multiply_piece_backward<C>(a, a.pieces[p], ahead, vectors);
    else multiply_piece_forward<C>(a, a.pieces[p], ahead, vectors);
  }
  tile_release();
}

inline void pack_for_tiles(const ProductArgs& a, int64_t vector, int64_t first_feature, int64_t last_feature) {
  if (a.by_in) pack_backward(a, vector, first_feature, last_feature);
  else pack_forward(a, vector, first_feature, last_feature);
}

template <class C>
ProductKernel make_tile_product(Isa isa) {
  return {.isa = isa,
          .dtype = C::dtype,
          .tile = C::tile,
          .lanes = C::lanes,
          .by_token = C::by_token,
          .side_by_side = false,
          .pack = pack_for_tiles,
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
}  // namespace blocksparse::gemm
