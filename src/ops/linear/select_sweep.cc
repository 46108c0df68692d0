#include "ops/linear/select_sweep.h"

namespace blocksparse::linear {

// The last block of inputs is whole: boxes fill x up with zeros, but W may hold anything there.
bool sweep_supports(const CudaProblem& p) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 2 * kSweepTokens;
  return p.pass != Pass::wgrad && size_of(p.dtype) == 2 && p.block <= 32 && p.n >= 1 && p.n < kMost && p.inputs >= 1 &&
         p.inputs < kMost && p.outputs >= 1 && p.outputs < kMost && p.inputs % p.block == 0 && p.x_in_rows &&
         !p.x_first && p.w_aligned && !p.gated && (p.n / kSweepTokens + 1) * (p.outputs / kSweepOutputs + 1) < kMost;
}

bool sweep_pays(const CudaProblem&) { return false; }

}  // namespace blocksparse::linear
