// The family `w_in_smem`: how a product of few features and many tokens is divided. All functions are pure functions of
// sizes.
#pragma once

#include <optional>

#include "gemm/cuda/problem.h"

namespace blocksparse::gemm::w_in_smem {

// The functions of the family's row: see families.h.
bool supports(const CudaProblem& p);
int64_t least_tokens(const CudaProblem& p);
bool pays(const CudaProblem& p, const cuda::Card& card);
int64_t workspace_bytes(const CudaProblem& p);

inline constexpr int32_t kWarps = 16;  // warps that multiply
inline constexpr int32_t kSide = 32;   // side of a warp tile: tokens, and outputs
inline constexpr int32_t kMostStages = 8;
inline constexpr int32_t kSharedBytes = 226 * 1024;       // of shared memory
inline constexpr int32_t kTileBytes = kSide * kSide * 2;  // of y, for each warp

struct Plan {
  int32_t tokens;  // of a tile
  int32_t chunks;  // chunks of 64 inputs
  int32_t strips;  // strips of outputs, one warp tile each
  int32_t tiles;
  int32_t stages, stage_bytes, w_bytes, list_bytes;  // in this order in shared memory, after y

  constexpr int32_t warp_tiles() const { return tokens / kSide * strips; }  // warp tiles of a tile
  int32_t shared_bytes() const { return kWarps * kTileBytes + stages * stage_bytes + w_bytes + list_bytes; }
};
// Nothing if W and two stages do not fit.
std::optional<Plan> plan_of(const CudaProblem& p);

}  // namespace blocksparse::gemm::w_in_smem
