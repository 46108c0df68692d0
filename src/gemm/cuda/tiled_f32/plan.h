// The family `tiled_f32`: f32 and tf32 of more than 64 tokens, wgrad of any number, and its part of the workspace. All
// functions are pure functions of sizes and card.
#pragma once

#include "gemm/cuda/problem.h"

namespace blocksparse::gemm::tiled_f32 {

// The functions of the family's row: see families.h.
bool supports(const CudaProblem& p);
int64_t least_tokens(const CudaProblem& p);
bool pays(const CudaProblem& p, const cuda::Card& card);
int64_t workspace_bytes(const CudaProblem& p);

inline constexpr int32_t kOutputs = 128;  // fprop, dgrad: of a tile, whose tokens are as many
inline constexpr int32_t kTokens = 128;

// The number of tiles of outputs.
int64_t groups_of(const CudaProblem& p);

// fprop and dgrad: where the lists begin, in bytes.
struct WorkspacePlaces {
  int64_t counts = 0, inputs = 0, weights = 0, end = 0;
};
WorkspacePlaces workspace_places(const CudaProblem& p);

// wgrad: the blocks of one row of W that a thread block takes, and the most runs that there can be.
int32_t run_blocks(int32_t block);
int64_t most_runs(const CudaProblem& p);

}  // namespace blocksparse::gemm::tiled_f32
