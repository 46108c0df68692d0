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

int64_t least_tokens(const CudaProblem& p) { return p.block == 64 ? 48 : 65; }

// Larger tiles read W less often; they must leave a job and a half for every SM, six where rows are uneven.
// us of jobs of 64, 128 and 256 tokens, 4096 x 4096, bf16, hot, H100, 2026-11-25
//   b = 64, .25   n = 256 7.8, 8.9; n = 512 16.1, 13.3, 14.8; n = 1024 30.5, 26.0, 23.3
//   b = 32, .1    n = 256 9.3, 8.3, 8.4; n = 512 16.6, 13.9, 12.5; n = 1024 30.3, 25.1, 22.9
//   b = 128, .25  n = 512 11.6, 12.1; n = 1024 21.5, 18.2
//   whole rows of ba(288,3), b = 64, H200, 2026-11-26: n = 256 20.1, 22.9; n = 1024 68.0, 61.5; ba(576,8), b = 32: n =
//   256 46.8, 41.1
// 256 tokens of b = 64 are of a form with outputs on wgmma's rows, which is not here; with tokens there they lost: n =
// 1024, .1 17.0, 14.4 with 128. Gated sums are held twice, so more than 64 tokens have no room; nor have 256 of b =
// 128.
int32_t tokens_of_tile(const CudaProblem& p, const cuda::Card& card) {
  if (p.gated || p.x_first) return 64;
  const int64_t half_jobs = p.slots > 0 ? 12 : 3;  // of an SM: rows that differ much need more of them to even out
  const auto pays = [&](int64_t tokens) {
    return p.n > tokens / 2 && 2 * p.output_blocks() * ceil_div(p.n, tokens) >= half_jobs * card.multiprocessors;
  };
  if (p.block == 32 && pays(256)) return 256;
  return pays(128) ? 128 : 64;
}

// A row has as many blocks as there are of inputs, at most. Where that is not far above what an SM has of all rows, to
// add slices takes longer than a row that is late: ba(288,3,blocks=2448), b = 64, 256 tokens 26.2 us, whole 20.1 (H200,
// 2026-11-26).
bool adds_slices(const CudaProblem& p) {
  constexpr int64_t kMultiprocessors = 132, kMostOfMean = 4;
  const int64_t tiles = ceil_div(p.n, int64_t{64});
  return p.n <= kMostTokensOfSlices && p.input_blocks() * kMultiprocessors > kMostOfMean * p.blocks * tiles;
}

int64_t most_splits(const CudaProblem& p) { return std::min(p.slots / 2, kMaxSplits); }

// us, bf16, hot, row_wgmma (best of the others), H100, 2026-11-25
//   b = 64, 4096 x 4096   n = 48, .25 6.9 (7.1), .1 5.1 (4.9); n = 64, .25 6.6 (7.6), .1 5.0 (5.2), .02 3.8 (3.6)
//                         n = 128, .1 4.8 (7.2); n = 256, .25 8.3 (20.3); n = 512, .1 8.1 (14.2)
//                         n = 1024, .1 13.7 (17.2), .25 27.8 (28.9); 12288 x 12288, .1 91.9 (wgmma 80.4)
//   ba(288,3), b = 64     n = 64 15.3 (15.7; from memory 16.5, 19.2); n = 256 26.2 (49.7); n = 1024 85.4 (89.7)
//   b = 128               n = 64, .25 9.4 (8.0); n = 128, .1 6.4 (7.6); n = 256, .25 9.4 (17.9); n = 512, .1 7.2 (15.1)
//   b = 32                n = 64, .25 8.1 (7.6); n = 128, .1 5.8 (7.0); n = 512, .25 26.9 (30.4)
//                         n = 1024, .25 51.0 (stream_x 32.9), .05 14.2 (19.8), .1 23.1 (24.0); 1024 x 1024, .25 6.4
//                         (11.4) n = 2048, .05 28.0 (33.5), .1 44.8 (44.5)
//   65 tokens, H200, the kernel before   b = 32: 4096 x 4096, .1 8.0 (7.2)
// What shares x among outputs needs blocks enough of each input; it then has less to read.
// Gates and features-first x are not measured.
bool pays(const CudaProblem& p, const cuda::Card&) {
  if (p.gated || p.x_first) return false;
  if (p.n < 65) return p.density() >= 0.08 || (p.n > 56 && p.slots > 0);
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
