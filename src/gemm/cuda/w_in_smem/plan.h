// How the kernel `resident` divides a product of few features and many tokens: pure functions of sizes.
#pragma once

#include <optional>

#include "gemm/cuda/select.h"

namespace blocksparse::gemm {

inline constexpr int32_t kResidentWarps = 16;  // that multiply
inline constexpr int32_t kResidentSide = 32;   // of a unit: tokens, and outputs
inline constexpr int32_t kMostResidentStages = 8;
inline constexpr int32_t kResidentBytes = 226 * 1024;                             // of shared memory
inline constexpr int32_t kResidentUnitBytes = kResidentSide * kResidentSide * 2;  // of y, for each warp

struct ResidentPlan {
  int32_t tokens;  // of a tile
  int32_t chunks;  // of 64 inputs
  int32_t strips;  // of outputs, a unit's each
  int32_t tiles;
  int32_t stages, stage_bytes, w_bytes, list_bytes;  // in this order in shared memory, behind y

  constexpr int32_t units() const { return tokens / kResidentSide * strips; }  // of a tile
  int32_t shared_bytes() const {
    return kResidentWarps * kResidentUnitBytes + stages * stage_bytes + w_bytes + list_bytes;
  }
};
// Nothing where W and two stages do not fit.
std::optional<ResidentPlan> plan_resident(const CudaProblem& p);

bool resident_supports(const CudaProblem& p);  // on a card that runs it
bool resident_pays(const CudaProblem& p);

}  // namespace blocksparse::gemm
