// Stores sums of wgmma as rows of y, through shared memory. The code is a fifth as long as stores from registers. Its
// instructions are fetched as they run, and nothing hides that behind the last job of a thread block.
#pragma once

#include "cuda/number.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/stmatrix.h"

namespace blocksparse::gemm {
namespace {

// Stores a warp's 16 tokens x Block outputs of 16-bit elements. `sums`: a lane's Block / 2 sums, as wgmma leaves them.
// `own`: 16 x Block elements of shared memory of this warp. `to`: the first token's first output, at a multiple of 16
// bytes, as `stride` elements between tokens are. Tokens from `tokens` on and outputs from `outputs` on, a multiple of
// 8, are not stored.
template <class T, int Block>
__device__ inline void store_rows(uint32_t own, const float* sums, T* to, int64_t stride, int tokens, int64_t outputs) {
  constexpr int kPitch = Block * 2, kChunks = Block / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto at = [&](int row, int chunk) {
    return own + static_cast<uint32_t>(row * kPitch + (chunk ^ (Block == 32 ? row / 2 % 4 : row % 8)) * 16);
  };
#pragma unroll
  for (int c = 0; c < Block / 16; ++c) {
    const float* of = sums + 8 * c;
    const uint32_t words[4] = {narrow_pair(of[0], of[1], T{}), narrow_pair(of[2], of[3], T{}),
                               narrow_pair(of[4], of[5], T{}), narrow_pair(of[6], of[7], T{})};
    ptx::stmatrix_x4(at(lane % 16, 2 * c + lane / 16), words);
  }
  __syncwarp();
  const int row = lane / kChunks, column = lane % kChunks * 8;
  to += row * stride + column;
#pragma unroll
  for (int i = 0; i < 16; i += 32 / kChunks, to += 32 / kChunks * stride) {
    const int4 eight = ptx::ld_shared_16(at(row + i, lane % kChunks));
    if (row + i < tokens && column < outputs) *reinterpret_cast<int4*>(to) = eight;
  }
  __syncwarp();
}

}  // namespace
}  // namespace blocksparse::gemm
