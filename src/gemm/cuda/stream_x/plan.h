// How the kernel `sweep` divides a product of many tokens: pure functions of sizes.
#pragma once

#include <cstdint>

#include "gemm/cuda/select.h"

namespace blocksparse::gemm {

inline constexpr int32_t kSweepTokens = 128, kSweepOutputs = 256;  // of a tile
inline constexpr int32_t kSweepInputs = 128;                       // of a chunk of x: two boxes of 64
inline constexpr int32_t kSweepStages = 5;
inline constexpr int32_t kSweepStageBytes = kSweepTokens * kSweepInputs * 2;
inline constexpr int32_t kSweepWeightBytes = 64 * 1024;  // of W, on its way to the warps
inline constexpr int32_t kSweepSharedBytes = kSweepStages * (kSweepStageBytes + 16) + kSweepWeightBytes;

// That multiply. Of b = 32 each has 128 sums a lane, else 64.
constexpr int32_t sweep_warps(int32_t block) { return block == 32 ? 8 : 16; }

constexpr int64_t sweep_tiles(const CudaProblem& p) {
  return ((p.n + kSweepTokens - 1) / kSweepTokens) * ((p.outputs + kSweepOutputs - 1) / kSweepOutputs);
}

bool sweep_supports(const CudaProblem& p);  // on a card that runs it
bool sweep_pays(const CudaProblem& p);

}  // namespace blocksparse::gemm
