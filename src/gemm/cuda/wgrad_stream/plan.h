// The family `wgrad_stream`: weight gradients of up to 2048 tokens. Pure functions of sizes and card.
#pragma once

#include <cstdint>

#include "gemm/cuda/problem.h"

namespace blocksparse::gemm::wgrad_stream {

// The family's row of the table: see families.h.
bool supports(const CudaProblem& p);
int64_t least_tokens(const CudaProblem& p);
bool pays(const CudaProblem& p, const cuda::Card& card);
int64_t workspace_bytes(const CudaProblem& p);

// Up to so many tokens writing dW is the bound. Above, the copy of the tokens is.
constexpr int64_t most_tokens(const CudaProblem& p) {
  if (p.dtype == DType::f32) return p.block == 8 ? 1024 : 256;
  return p.block >= 64 ? 1024 : 2048;
}

struct Plan {
  int32_t patch = 0;  // edge of what a warp computes at once
  int64_t patches = 0, input_patches = 0, output_patches = 0;
  int64_t packed_bytes = 0;  // of x and dy; the parts of the gates' gradients lie behind them
  int64_t workspace_bytes = 0;
};
Plan plan_of(const CudaProblem& p);

// How many warps share a tile of patches. `chunks` are of 32 tokens.
int32_t warps_of_tile(int64_t tiles, int64_t chunks, const cuda::Card& card);

// Whether it can do a weight gradient, and does it faster than `wgrad_wgmma` and `wgrad_in_registers`.
bool is_best(const CudaProblem& p, const cuda::Card& card);

}  // namespace blocksparse::gemm::wgrad_stream
