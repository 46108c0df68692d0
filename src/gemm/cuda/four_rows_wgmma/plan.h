// The family `four_rows_wgmma`: four rows of blocks that share x. All functions are pure functions of sizes and card.
#pragma once

#include <cstdint>

#include "gemm/cuda/problem.h"

namespace blocksparse::gemm::four_rows_wgmma {

// The functions of the family's row: see families.h.
bool supports(const CudaProblem& p);
int64_t least_tokens(const CudaProblem& p);
bool pays(const CudaProblem& p, const cuda::Card& card);
int64_t workspace_bytes(const CudaProblem& p);

}  // namespace blocksparse::gemm::four_rows_wgmma
