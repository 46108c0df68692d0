#include "gemm/cuda/wgrad_block/plan.h"

#include "core/ceil_div.h"
#include "gemm/cuda/wgrad_wgmma/plan.h"

namespace blocksparse::gemm::wgrad_block {

// us, bf16, 4096 x 4096, n = 1024 and 4096, tokens x stages, in a program of its own; H100, 2026-11-26
//   b = 64, 82 blocks: 64 x 6 5.7, 24.0; 32 x 5 8.3, 34.8
//   b = 64, 410 blocks: 32 x 6 11.3, 39.4; 32 x 5 11.5, 40.5; 64 x 6 14.4, 52.8
//   b = 64, 1024 blocks: 32 x 6 27.0, 99.7; 32 x 5 28.3, 102; 64 x 3 27.2, 105. 12288 x 12288, 2447 blocks, n = 256 and
//   2048: 32 x 5 24.9, 157; 32 x 6 25.2, 174
//   b = 128, 102 blocks: 64 x 6 9.0, 30.1; 32 x 6 11.8, 36.9. 256 blocks: 32 x 6 16.4, 51.1; 64 x 5 18.1, 58.9
Ring ring_of(const CudaProblem& p, const cuda::Card& card) {
  const int64_t each = ceil_div(p.blocks, card.multiprocessors);  // thread blocks an SM
  if (each <= 1) return {.tokens = 64, .stages = 6};
  return {.tokens = 32, .stages = p.block == 64 && each > 10 ? 5 : 6};
}

bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 31;
  return p.pass == Pass::wgrad && size_of(p.dtype) == 2 && p.block >= 64 && p.n >= 1 && p.inputs >= 1 &&
         p.outputs >= 1 && p.x_in_rows && p.w_aligned && !p.x_first && !p.gated &&
         p.pairs <= wgrad_wgmma::kTermsOfLaunch && p.blocks < kMost && p.n < kMost && p.outputs < kMost &&
         p.inputs < kMost;
}

int64_t least_tokens(const CudaProblem&) { return 1; }

bool pays(const CudaProblem& p, const cuda::Card& card) {
  // Each block reads its x and dy. Of many blocks that do not fit L2 together, wgrad_wgmma reads less.
  constexpr int64_t kL2 = 60'000'000;
  return 2 * p.n * (p.inputs + p.outputs) <= kL2 || p.blocks <= 10 * card.multiprocessors;
}

int64_t workspace_bytes(const CudaProblem&) { return 0; }

}  // namespace blocksparse::gemm::wgrad_block
