// The family `stream_w`: W streams past few tokens. All functions are pure functions of sizes and card.
#pragma once

#include <cstdint>

#include "gemm/cuda/problem.h"

namespace blocksparse::gemm::stream_w {

// The functions of the family's row: see families.h.
bool supports(const CudaProblem& p);
int64_t least_tokens(const CudaProblem& p);
bool pays(const CudaProblem& p, const cuda::Card& card);
int64_t workspace_bytes(const CudaProblem& p);

inline constexpr int64_t kTokens = 64;  // tokens of a slice
inline constexpr int64_t kMostTokens = 8 * kTokens;

// Tokens of a launch. More tokens come in rounds of this size.
int64_t round_tokens(const CudaProblem& p);

struct Plan {
  int32_t tokens = 0;  // tokens of a slice: n rounded up to a number that has a kernel
  int32_t slices = 1;
  int32_t warps = 0;  // warps of a thread block
  bool pack = false;  // x is copied even if it could be read in place
};
Plan plan_of(const CudaProblem& p, bool gated, const cuda::Card& card);

struct WorkspaceParts {
  int64_t partial_bytes = 0, packed_bytes = 0;  // they follow one another in this order
};
WorkspaceParts workspace_parts(const CudaProblem& p);

}  // namespace blocksparse::gemm::stream_w
