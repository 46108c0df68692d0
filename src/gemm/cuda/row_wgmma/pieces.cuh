// Clusters of thread blocks that take pieces of the list side by side: all slices of a row are within one, from a
// multiple of their number on (core/tables.h), so they can add their sums without a kernel behind.
#pragma once

#include "gemm/cuda/call.h"

namespace blocksparse::gemm::row_wgmma {
namespace {

inline constexpr int kClusterPieces = kFewSlices;

struct ClusterPiece {
  Piece piece;
  int slices;  // of its row, 1 if that is whole
};

// All lanes of a warp: the piece `item`. False: there are less. The tables are read all at once.
__device__ inline bool find_cluster_piece(const DeviceWalk& walk, int item, ClusterPiece& found) {
  const int lane = static_cast<int>(threadIdx.x) % 32, rank = item % kClusterPieces;
  const int other = item - rank + lane % kClusterPieces;
  const Piece piece = walk.pieces[other];
  const int count = walk.counts[0];
  if (item >= count) return false;
  found.piece = {__shfl_sync(~0u, piece.to, rank), __shfl_sync(~0u, piece.first, rank),
                 __shfl_sync(~0u, piece.last, rank), __shfl_sync(~0u, piece.slot, rank)};
  const bool slice = lane < kClusterPieces && other < count && piece.slot >= 0;
  const int of_row = __popc(__ballot_sync(~0u, slice && piece.to == found.piece.to));
  found.slices = found.piece.slot >= 0 ? of_row : 1;
  return true;
}

}  // namespace
}  // namespace blocksparse::gemm::row_wgmma
