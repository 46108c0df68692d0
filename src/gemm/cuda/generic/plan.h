// The family `generic`: any problem on any card.
#pragma once

#include <cstdint>

#include "gemm/cuda/problem.h"

namespace blocksparse::gemm::generic {

// The functions of the family's row: see families.h.
bool supports(const CudaProblem& p);
int64_t least_tokens(const CudaProblem& p);
bool pays(const CudaProblem& p, const cuda::Card& card);
int64_t workspace_bytes(const CudaProblem& p);

// Whether thread blocks share a long row and add its sums through the workspace.
bool splits(const CudaProblem& p);

// The number of pairs (x, dy) that one launch of wgrad sums. Terms after the first 64 lie in the workspace.
inline constexpr int64_t kTermsByValue = 64;
inline constexpr int64_t kMostTerms = 4096;
inline constexpr int64_t kTermBytes = 48;

}  // namespace blocksparse::gemm::generic
