#include "gemm/cuda/wgrad_range/plan.h"

#include "gemm/cuda/wgrad_wgmma/plan.h"

namespace blocksparse::gemm::wgrad_range {

bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 31;
  return p.pass == Pass::wgrad && size_of(p.dtype) == 2 && p.block >= 64 && p.n >= 1 && p.inputs >= 1 &&
         p.outputs >= 1 && p.x_in_rows && p.w_aligned && !p.x_first && !p.gated &&
         p.pairs <= wgrad_wgmma::kTermsOfLaunch && p.blocks < kMost && p.n < kMost && p.outputs < kMost &&
         p.inputs < kMost;
}

int64_t least_tokens(const CudaProblem&) { return 33; }

bool pays(const CudaProblem& p, const cuda::Card& card) {
  return p.n > 256 || (p.n >= 96 && p.blocks >= 6 * card.multiprocessors);
}

int64_t workspace_bytes(const CudaProblem&) { return 0; }

}  // namespace blocksparse::gemm::wgrad_range
