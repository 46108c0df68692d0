#include "gemm/cuda/w_in_smem/plan.h"

#include <algorithm>

#include "core/ceil_div.h"
#include "core/places.h"
#include "gemm/cuda/wgmma/plan.h"

namespace blocksparse::gemm::w_in_smem {

std::optional<Plan> plan_of(const CudaProblem& p) {
  const int64_t strips = ceil_div(p.outputs, kSide), chunks = ceil_div(p.inputs, wgmma::kChunk);
  if (strips > kWarps || chunks > kWarps) return std::nullopt;
  const int64_t w_bytes = p.blocks * p.block * p.block * 2;
  const int64_t list_bytes = whole_lines((p.blocks + 1 + p.output_blocks() + 1) * 4);
  // Each warp has one warp tile of a tile, so tiles have 32 tokens if there are more than 256 outputs.
  const int32_t tokens = 2 * strips > kWarps ? kSide : 2 * kSide;
  const int64_t stage_bytes = chunks * tokens * wgmma::kChunk * 2;
  const int64_t stages = (kSharedBytes - kWarps * kTileBytes - w_bytes - list_bytes) / stage_bytes;
  if (stages < 2) return std::nullopt;
  return Plan{.tokens = tokens,
              .chunks = static_cast<int32_t>(chunks),
              .strips = static_cast<int32_t>(strips),
              .tiles = static_cast<int32_t>(ceil_div(p.n, tokens)),
              .stages = static_cast<int32_t>(std::min<int64_t>(kMostStages, stages)),
              .stage_bytes = static_cast<int32_t>(stage_bytes),
              .w_bytes = static_cast<int32_t>(whole_lines(w_bytes)),
              .list_bytes = static_cast<int32_t>(list_bytes)};
}

bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 2 * kSide;
  return p.pass != Pass::wgrad && size_of(p.dtype) == 2 && p.block <= 32 && p.n >= 1 && p.n < kMost && p.inputs >= 1 &&
         p.outputs >= 1 && p.x_in_rows && !p.x_first && p.w_aligned && !p.gated && !p.glu && plan_of(p);
}

// It reads x once and needs no kernel before it: 256 x 256, b = 32, 50176 tokens, density .25, H200, 2026-11-22: 14.3
// us, wgmma 20.1. With more blocks its products bound it. For b = 32, row_wgmma is faster below 1024 tokens: 256
// tokens, H100, 2026-11-25: 2.8 us, w_in_smem 3.2. NOTES.md has the table; everything beyond it is left to wgmma.
int64_t least_tokens(const CudaProblem& p) { return p.block == 32 ? 1024 : 256; }

bool pays(const CudaProblem& p, const cuda::Card&) {
  constexpr int64_t kMostOfSmallest = 32768;
  const double most = p.block == 8 ? 0.25 : p.block == 16 ? 0.36 : 0.56;
  return (p.block > 8 || p.n <= kMostOfSmallest) && p.density() <= most;
}

int64_t workspace_bytes(const CudaProblem&) { return 0; }

}  // namespace blocksparse::gemm::w_in_smem
