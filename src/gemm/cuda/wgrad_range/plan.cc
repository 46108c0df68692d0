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

// Its times beside the others' are in NOTES.md.
bool pays(const CudaProblem& p, const cuda::Card& card) {
  const int64_t sms = card.multiprocessors;
  // Every four blocks read their x and dy again. What exceeds L2 is better cut along the tokens: wgrad_wgmma does.
  constexpr int64_t kL2 = 60'000'000;
  if (2 * p.n * (p.inputs + p.outputs) > kL2 && p.blocks > 10 * sms) return false;
  // Few blocks begin and end sooner in the several thread blocks an SM of wgrad_block.
  if (p.block == 128) {
    return p.n >= 2048 ? 3 * p.blocks > sms : p.n >= 96 && 2 * p.blocks > 3 * sms;
  }
  if (p.blocks <= sms) return p.n <= 2048;
  return p.n > 512 || (p.n >= 96 && p.blocks >= 6 * sms);
}

int64_t workspace_bytes(const CudaProblem&) { return 0; }

}  // namespace blocksparse::gemm::wgrad_range
