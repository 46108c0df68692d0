// The family `row_wgmma`: rows of blocks times 64 to 256 tokens. Pure functions of sizes and card.
#pragma once

#include <cstdint>

#include "gemm/cuda/problem.h"

namespace blocksparse::gemm::row_wgmma {

// The family's row of the table: see families.h.
bool supports(const CudaProblem& p);
int64_t least_tokens(const CudaProblem& p);
bool pays(const CudaProblem& p, const cuda::Card& card);
int64_t workspace_bytes(const CudaProblem& p);

// Tokens of a job: 64, 128 or 256.
int32_t tokens_of_tile(const CudaProblem& p, const cuda::Card& card);

// Whether the slices of a cut row are jobs of their own, whose sums a second kernel adds; else rows are walked whole.
bool adds_slices(const CudaProblem& p);

// Rows that are cut, at most.
int64_t most_splits(const CudaProblem& p);

}  // namespace blocksparse::gemm::row_wgmma
