#include "gemm/cuda/stream_x/plan.h"

#include "gemm/cuda/stream_w/plan.h"

namespace blocksparse::gemm::stream_x {

// The last block of inputs is whole: boxes fill x up with zeros, but W may hold anything there.
bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 2 * kTokens;
  return p.pass != Pass::wgrad && size_of(p.dtype) == 2 && p.block <= 32 && p.n >= 1 && p.n < kMost && p.inputs >= 1 &&
         p.inputs < kMost && p.outputs >= 1 && p.outputs < kMost && p.inputs % p.block == 0 && p.x_in_rows &&
         !p.x_first && p.w_aligned && !p.gated && !p.glu && tiles_of(p) < kMost;
}

// us of bf16 fprop, H200, 2026-11-24, of stream_x and of the best other, which is wgmma if not said:
//
//   4096 x 4096, 4096 tokens    b = 8: of density .25 217, 192; .10 117, 190; .05 94, 133; .02 83, 92
//                               b = 16: .45 194, 191; .25 117, 158; .10 76, 100; .05 63, 81; .02 57, 58
//                               b = 32: .50 162, 180; .25 103, 108; .10 73, 71
//   4096 x 4096, 512 tokens     b = 8: .10 32.5, stream_w 31.6   b = 16: .25 36, stream_w 44; .10 20, stream_w 26
//                               b = 32: .50 46, 59; .25 31, stream_w 33; .10 20, row_wgmma 15
//   6144 x 6144, 8192 tokens    b = 8: .10 475, 772   b = 16: .10 305, 392   b = 32: .40 622, 605
//   1024 x 1024, 4096 tokens    b = 8: .10 16.3, 23.4   b = 16: .25 14.2, 20.5   b = 32: .25 12.8, 14.9
//   1024 x 1024, 1024 tokens    b = 16: .25 13.3, stream_w 12.6
//   hubs, 4096 tokens           b = 8: ba(512,16) 109, 179   b = 16: ba(256,16) 88, 130; ba(768,8) 547, 385
//
// And on an H100, 2026-11-25, of one wave of tiles, n = 1024: 4096 x 4096, b = 8, .25 63, 75; b = 16, .50 63, 72; b =
// 32, .10 24, 26, .05 20, 21, .02 18, 15. 12288 x 12288, b = 16, .05, n = 256 44, stream_w 52. 1024 x 1024, n = 1024
// b = 16, .25 13.1, stream_w 13.1, wgmma 19.8.
int64_t least_tokens(const CudaProblem&) { return 256; }

bool pays(const CudaProblem& p, const cuda::Card& card) {
  constexpr int64_t kLeastTiles = 32, kLeastTilesOfFew = 96, kLeastInputs = 1024;
  const int64_t tiles = tiles_of(p);
  if (tiles < (p.n < stream_w::kMostTokens ? kLeastTilesOfFew : kLeastTiles) || p.inputs < kLeastInputs) return false;
  if (p.n < stream_w::kMostTokens && p.block != 16) return false;  // not measured
  // A warp has a row to the end: one with a block for every input takes 1 / density as long as others. There may be
  // such rows, where any can be cut; tables made on a card do not say that there are none.
  const double density = p.density();
  if (p.slots > 0 && density < 0.05) return false;
  const bool one_wave = tiles <= card.multiprocessors;
  switch (p.block) {
    case 8: return density < (one_wave ? 0.3 : 0.2);
    case 16: return density >= 0.015 && density < (one_wave ? 0.55 : 0.44);
    default: return p.n <= 4096 && density >= (one_wave && p.n > stream_w::kMostTokens ? 0.045 : 0.2) && density < 0.58;
  }
}

int64_t workspace_bytes(const CudaProblem&) { return 0; }

}  // namespace blocksparse::gemm::stream_x
