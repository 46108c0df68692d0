// How the kernel `wgrad_block` ends: sums become blocks of dW.
#pragma once

#include "cuda/turn_quad.h"
#include "gemm/cuda/wgrad_block/feed.cuh"

namespace blocksparse::gemm::wgrad_block {
namespace {

// Of a lane: of 64 rows of 128 columns, which are those of two blocks (b = 64) or of half of one. wgmma gives it of
// each 16 x 8 those of rows lane / 4 (+ 8) and columns 2 (lane % 4) (+ 1).
constexpr int kSums = 64;
using Sums = float[kSums];

// Eight columns of a row.
template <class K>
__device__ inline void put(const Args& g, int32_t id, int64_t at, int inside, float (&values)[8]) {
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
__device__ inline void store(const Args& g, const Job<K>& job, Sums& sums) {
  constexpr int kOwn = 16;  // sums of 16 rows x 32 columns of a warp
  const int thread = static_cast<int>(threadIdx.x);
  const int in_row = (K::block == 64 ? 0 : static_cast<int>(blockIdx.x) % 2 * 64) + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll 1
  for (int group = 0; group < kSums / kOwn; ++group) {
    const int block = K::block == 64 ? group / 2 : 0, id = job.first + block;
    if (block >= job.count) return;
    const int in_column = group % (K::block / 32) * 32 + thread % 4 * 8;
    const int row = block == 0 ? job.row[0] : job.row[K::kBlocks - 1];
    const int column = block == 0 ? job.column[0] : job.column[K::kBlocks - 1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float values[8];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = sums[4 * j + 2 * half + i];
        cuda::turn_quad(words);
#pragma unroll
        for (int j = 0; j < 4; ++j) values[2 * j + i] = words[j];
      }
      const int r = in_row + 8 * half;
      const int64_t output = int64_t{row} * K::block + r, input = int64_t{column} * K::block + in_column;
      const int inside = output < g.outputs ? static_cast<int>(min(max(g.inputs - input, int64_t{0}), int64_t{8})) : 0;
      put<K>(g, id, (int64_t{id} * K::block + r) * K::block + in_column, inside, values);
    }
#pragma unroll
    for (int i = 0; i + kOwn < kSums; ++i) sums[i] = sums[i + kOwn];
  }
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_block
