#include "gemm/cuda/wgrad_block/plan.h"

namespace blocksparse::gemm::wgrad_block {

bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 31;
  return p.pass == Pass::wgrad && size_of(p.dtype) == 2 && p.block >= 64 && p.n >= 1 && p.inputs >= 1 &&
         p.outputs >= 1 && p.x_in_rows && p.w_aligned && !p.x_first && !p.gated && p.pairs == 1 &&
         p.blocks * 2 < kMost && p.n < kMost && p.outputs < kMost && p.inputs < kMost;
}

int64_t least_tokens(const CudaProblem&) { return 33; }

// us, bf16, hot, wgrad_block (best of the others), 2026-11-25
//   H100   b = 64: n = 64, .25 9.2 (7.5); n = 128, .25 10.6 (10.6), .1 5.7 (8.2); n = 256, .25 13.2 (16.1), .1 7.2
//          (11.2); n = 512, .1 10.5 (17.0); n = 1024, .25 33.8 (38.2), .1 17.3 (22.3); n = 2048, .1 33.9 (33.7)
//          b = 128: n = 256, .1 6.0 (11.1); n = 1024, .1 11.3 (17.6); n = 2048, .25 47.0 (45.9), .1 20.8 (26.3)
//          ba(288,3), b = 64: n = 64 17.2 (14.6); n = 256 28.7 (45.2); n = 1024 87.8 (93.7)
//          b = 32, before: n = 64, .1 8.2 (5.8); n = 256, .1 12.2 (9.7); n = 1024, .1 28.2 (32.0), .25 58.8 (59.7)
//   H200   b = 64: n = 512, .1 11.5 (17.0); n = 1024, .25 30.6 (44.0), .1 19.6 (31.0)
//          b = 64, 12288 x 12288, n = 64: .02 5.8 (7.3), .1 23.2 (17.9); b = 128, n = 4096: .05 32.8 (40.0), .1 41.7
//          (39.7)
// Lists, gates' gradients and features-first operands are not measured.
bool pays(const CudaProblem& p, const cuda::Card&) {
  if (p.block < 64 || p.pairs > 1 || p.gated || p.x_first) return false;
  if (p.n < 96) return p.density() < 0.05 && !p.uneven;
  return p.n <= (p.block == 128 ? 2048 : 1024);
}

int64_t workspace_bytes(const CudaProblem&) { return 0; }

}  // namespace blocksparse::gemm::wgrad_block
