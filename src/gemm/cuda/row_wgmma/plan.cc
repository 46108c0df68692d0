#include "gemm/cuda/row_wgmma/plan.h"

#include <algorithm>

#include "core/tables.h"

namespace blocksparse::gemm::row_wgmma {

namespace {
// Beyond, there are jobs enough without slices of rows, whose sums would be large.
constexpr int64_t kMostTokensOfSlices = 1024;
}  // namespace

bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 31;
  return p.pass != Pass::wgrad && size_of(p.dtype) == 2 && p.block >= 32 && p.n >= 1 && p.inputs >= 1 && p.x_in_rows &&
         p.w_aligned && !(p.gated && p.x_first) && !p.glu && p.blocks * p.block < kMost && p.outputs < kMost &&
         p.n < kMost - 256 && (p.output_blocks() + p.slots) * ceil_div(p.n, int64_t{64}) < kMost / 2;
}

int64_t least_tokens(const CudaProblem&) { return 65; }

// Larger tiles read W less often; they must leave a job and a half for every SM, and whole rows of few blocks do.
// us of jobs of 64, 128 and 256 tokens, 4096 x 4096, bf16, hot, H100, 2026-11-25
//   b = 64, .25   n = 256 7.8, 8.9; n = 512 16.1, 13.3, 14.8; n = 1024 30.5, 26.0, 23.3
//   b = 32, .1    n = 256 9.3, 8.3, 8.4; n = 512 16.6, 13.9, 12.5; n = 1024 30.3, 25.1, 22.9
//   b = 128, .25  n = 512 11.6, 12.1; n = 1024 21.5, 18.2
// Gated sums are held twice, so more than 64 tokens have no room; nor have 256 of b = 128.
int32_t tokens_of_tile(const CudaProblem& p, const cuda::Card& card) {
  if (p.gated || p.x_first) return 64;
  const auto pays = [&](int64_t tokens) {
    return p.n > tokens / 2 && 2 * p.output_blocks() * ceil_div(p.n, tokens) >= 3 * card.multiprocessors;
  };
  if (p.block == 32 && pays(256)) return 256;
  return pays(128) ? 128 : 64;
}

bool adds_slices(const CudaProblem& p) { return p.n <= kMostTokensOfSlices; }

int64_t most_splits(const CudaProblem& p) { return std::min(p.slots / 2, kMaxSplits); }

// us, bf16, hot, row_wgmma (best of the others), 2026-11-25
//   b = 64, H200    n = 128, .1 5.5 (7.4); n = 256, .25 10.3 (18.3); n = 512, .1 9.3 (13.4)
//   b = 128, H200   n = 128, .1 6.6 (7.8); n = 256, .25 10.7 (17.4); n = 512, .1 8.3 (14.3)
//   b = 32, H200    n = 128, .1 6.6 (7.7); n = 512, .25 25.8 (31.0); n = 1024, .25 49.1 (stream_x 31.9)
//   1024 tokens, H100    b = 64, .1 15.1 (17.2), .25 29.8 (28.9); 12288 x 12288, .1 96.4 (wgmma 80.4); ba(288,3)
//                   86.5 (89.7); b = 32, .05 15.7 (19.8), .1 25.5 (24.0); 1024 x 1024, .25 6.7 (11.4)
//   2048 tokens, H100    b = 32, .05 29.7 (33.5), .1 49.8 (44.5)
//   65 tokens, H200      b = 32: 4096 x 4096, .1 8.0 (7.2)
// What shares x among outputs needs blocks enough of each input; it then has less to read.
// Gates and features-first x are not measured.
bool pays(const CudaProblem& p, const cuda::Card&) {
  if (p.gated || p.x_first) return false;
  const int64_t rows = p.output_blocks();
  if (p.block == 32) {
    if (p.n <= 96) return p.density() < (rows >= 256 ? 0.6 : 0.05);
    if (p.n <= 256) return p.density() < 0.6;
    if (p.n <= 640) return p.density() < (rows <= 128 ? 0.3 : 0.15);
    return p.n <= 2048 && p.density() < (rows <= 32 ? 0.3 : 0.08);
  }
  return p.n <= 512 || (p.n <= 1024 && (p.density() < 0.05 || p.outputs <= 6144));
}

// The sums of slices.
int64_t workspace_bytes(const CudaProblem& p) {
  return supports(p) ? p.slots * std::min(p.n, kMostTokensOfSlices) * p.block * 4 : 0;
}

}  // namespace blocksparse::gemm::row_wgmma
