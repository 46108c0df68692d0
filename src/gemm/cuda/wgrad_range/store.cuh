// How the kernel `wgrad_range` ends: sums become blocks of dW.
#pragma once

#include "cuda/turn_quad.h"
#include "gemm/cuda/wgrad_range/feed.cuh"

namespace blocksparse::gemm::wgrad_range {
namespace {

// Of a lane, of four squares of 64: those of four blocks, or, b = 128, upper left, upper right, lower left, lower right
// of one. wgmma gives it of each 16 x 8 those of rows lane / 4 (+ 8) and columns 2 (lane % 4) (+ 1).
using Sums = float[4][32];

// Eight columns of a row.
template <class K>
__device__ inline void put(const typename K::KernelArgs& g, int32_t id, int64_t at, int inside, float (&values)[8]) {
  using T = typename K::Element;
  if (g.target.is_aligned() && (inside == 8 || !g.target.accumulate)) {  // else edges of dW would not be left alone
    g.target.template store_eight<T>(id, at, inside, values);
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    g.target.template store_pair<T>(id, at + k, min(max(inside - k, 0), 2), {values[k], values[k + 1]});
  }
}

// A loop whose sums move up, since registers have no index: straight code is long, and fetched as it runs.
template <class K>
__device__ inline void store(const typename K::KernelArgs& g, const Job& job, Sums& sums) {
  const int warp = static_cast<int>(threadIdx.x) % 128 / 32, squares = K::block == 64 ? job.count : 4;
#pragma unroll 1
  for (int square = 0; square < squares; ++square) {
    const int id = job.first + (K::block == 64 ? square : 0);
    const int in_row = (K::block == 64 ? 0 : square / 2 * 64) + warp * 16 + lane() / 4;
    const int in_column = (K::block == 64 ? 0 : square % 2 * 64) + lane() % 4 * 8;
    const int64_t output = int64_t{g.out_of[id]} * K::block + in_row;
    const int64_t input = int64_t{g.refs[id].from} * K::block + in_column;
#pragma unroll
    for (int first = 0; first < 64; first += 32) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float values[8];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float words[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) words[j] = sums[0][first / 2 + 4 * j + 2 * half + i];
          cuda::turn_quad(words);
#pragma unroll
          for (int j = 0; j < 4; ++j) values[2 * j + i] = words[j];
        }
        const int inside = output + 8 * half < g.outputs
                               ? static_cast<int>(min(max(g.inputs - input - first, int64_t{0}), int64_t{8}))
                               : 0;
        const int64_t at = (int64_t{id} * K::block + in_row + 8 * half) * K::block + in_column + first;
        put<K>(g, id, at, inside, values);
      }
    }
#pragma unroll
    for (int s = 0; s < 3; ++s) {
#pragma unroll
      for (int i = 0; i < 32; ++i) sums[s][i] = sums[s + 1][i];
    }
  }
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_range
