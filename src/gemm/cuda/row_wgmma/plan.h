// The family `row_wgmma`: rows of blocks times 128 tokens. Pure functions of sizes and card.
#pragma once

#include <cstdint>

#include "gemm/cuda/problem.h"

namespace blocksparse::gemm::row_wgmma {

// The family's row of the table: see families.h.
bool supports(const CudaProblem& p);
int64_t least_tokens(const CudaProblem& p);
bool pays(const CudaProblem& p, const cuda::Card& card);
int64_t workspace_bytes(const CudaProblem& p);

// Whether no row has more slices than a cluster has thread blocks: then each does one.
bool slices_fit_clusters(const CudaProblem& p);

// Whether the rows r, r + rows / 4, ... are walked together: those of four gates, say.
bool rows_in_fours(const CudaProblem& p);

}  // namespace blocksparse::gemm::row_wgmma
