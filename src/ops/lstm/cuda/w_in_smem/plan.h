// Whether all forward steps are one launch on a card, and how it is divided. Pure functions of sizes and card, which
// builds without CUDA test too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/card.h"
#include "ops/lstm/lstm.h"

namespace blocksparse::lstm {

inline constexpr int kStripUnits = 32;    // hidden units of a strip, and inputs of a chunk
inline constexpr int kParts = 4;          // warps of a strip
inline constexpr int kChunkBytes = 8192;  // bytes of W: 32 inputs of a strip, four gates
inline constexpr int kMostChunks = 28;    // in the shared memory of an SM
inline constexpr int kMostWarps = 16;     // of an SM
inline constexpr int kMostStrips = 4;     // strips of an SM
inline constexpr int kMostGroups = 2;     // of sequences
inline constexpr int kFlagWords = 8;      // a counter has 32 bytes of its own

struct WInSmemPlan {
  int32_t grid = 0;    // thread blocks, one an SM; 0: it does not fit
  int32_t strips = 0;  // of a thread block, at most
  int32_t tokens = 0;  // of a warp
  int32_t groups = 0;  // of warps that share weights, each with sequences of its own

  int32_t warps() const { return kParts * strips * groups; }
  bool fits() const { return grid > 0; }
};
WInSmemPlan plan_w_in_smem(const LayoutView& layout, DType dtype, int64_t steps, int64_t n, const cuda::Card& card);
size_t w_in_smem_workspace_bytes(const LayoutView& layout);

}  // namespace blocksparse::lstm
