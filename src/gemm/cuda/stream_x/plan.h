// The family `stream_x`: how a product of small blocks and many tokens is divided. All functions are pure functions of
// sizes.
#pragma once

#include <cstdint>

#include "core/ceil_div.h"
#include "gemm/cuda/problem.h"

namespace blocksparse::gemm::stream_x {

// The functions of the family's row: see families.h.
bool supports(const CudaProblem& p);
int64_t least_tokens(const CudaProblem& p);
bool pays(const CudaProblem& p, const cuda::Card& card);
int64_t workspace_bytes(const CudaProblem& p);

inline constexpr int32_t kMostTokens = 128, kOutputs = 256;  // of a tile
inline constexpr int32_t kInputs = 128;                      // of a chunk of x: two boxes of 64
inline constexpr int32_t kWeightBytes = 64 * 1024;           // W on its way to the warps

// The tokens of a tile: 64 or 128.
int32_t tokens_of_tile(const CudaProblem& p, const cuda::Card& card);

// Consumer warps per thread block. A lane accumulates 128 sums for b = 32, otherwise 64.
constexpr int32_t warps_of(int32_t block) { return block == 32 ? 8 : 16; }

constexpr int64_t tiles_of(const CudaProblem& p, int64_t tokens) {
  return ceil_div(p.n, tokens) * ceil_div(p.outputs, kOutputs);
}

}  // namespace blocksparse::gemm::stream_x
