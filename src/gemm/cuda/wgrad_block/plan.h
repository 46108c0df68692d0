// The family `wgrad_block`: a thread block for each block of dW. Pure functions of sizes and card.
#pragma once

#include <cstdint>

#include "gemm/cuda/problem.h"

namespace blocksparse::gemm::wgrad_block {

constexpr int kStages = 6;  // at most

// How a thread block walks the tokens: tokens of a stage, stages in shared memory, and the blocks of dW that it makes.
struct Ring {
  int32_t tokens = 32, stages = 5, blocks = 1;
};

Ring ring_of(const CudaProblem& p, const cuda::Card& card);

// Whether stages are filled by cp.async instead of TMA.
bool copies(const CudaProblem& p, const cuda::Card& card);

// The family's row of the table: see families.h.
bool supports(const CudaProblem& p);
int64_t least_tokens(const CudaProblem& p);
bool pays(const CudaProblem& p, const cuda::Card& card);
int64_t workspace_bytes(const CudaProblem& p);

}  // namespace blocksparse::gemm::wgrad_block
