#include "gemm/cuda/row_wgmma/plan.h"

#include "core/index.h"
#include "gemm/cuda/stream_w/plan.h"

namespace blocksparse::gemm::row_wgmma {

bool slices_fit_clusters(const CudaProblem& p) {
  return most_slices(p.output_blocks(), p.input_blocks(), p.blocks) <= kFewSlices;
}

bool rows_in_fours(const CudaProblem& p) { return !p.by_in && p.outputs == 4 * p.inputs && p.inputs % p.block == 0; }

// The last block of inputs is whole: boxes fill x up with zeros, but W may hold anything there.
bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 31;
  return p.pass != Pass::wgrad && size_of(p.dtype) == 2 && p.block == 32 && p.n >= 1 && p.inputs >= 1 &&
         p.inputs % p.block == 0 && p.x_in_rows && !p.x_first && p.w_aligned && !p.gated &&
         p.blocks * p.block < kMost && p.outputs < kMost && p.n <= stream_w::kMostTokens;
}

int64_t least_tokens(const CudaProblem&) { return stream_w::kTokens + 1; }

// us, bf16, b = 32, H200, 2026-11-22, stream_w (row_wgmma), of 65, 128, 256 and 512 tokens
//   4096, 10 %      7.2 (8.0), 7.7 (8.0), 12.6 (11.0), 19.4 (14.9)
//   5600, 4 %       6.5 (7.2), 6.9 (6.8), 11.1 (8.6), 20.4 (12.2)
//   5600, 4 %, four rows together    19.6 (11.2), 21.1 (11.5), 39.6 (17.1), 74.9 (26.4)
//   8192, 2 %       8.6 (7.2), 9.6 (6.6), 14.6 (8.9), 27.1 (12.6)
//   8192, 10 %      16.6 (22.1), 18.4 (19.2), 28.3 (26.8), 54.6 (45.1)
//   8192, 50 %      60 (101), 62 (82), 96 (131), 186 (215): stream_w packs x there
//   18432, 2.95 %   22.4 (21.5), 24.3 (20.1), 45.9 (35.5), 90.7 (63.8)
//   1024, 25 %      512 tokens, H100, 2026-11-25: 7.6 (6.0)
//   4096, 5 %       128 tokens, H100, 2026-11-25: 5.4 (6.2)
//   ba(384,8)       128, 256 and 512 tokens: 22.1 (18.5), 40.0 (30.4), 71.0 (66.1): clusters share rows that are cut
// Four rows together are walked whole, the longest by one thread block: it is no longer than there are blocks of
// inputs.
bool pays(const CudaProblem& p, const cuda::Card&) {
  constexpr int64_t kMostOfHub = 256;
  if (p.slots > 0 && !(rows_in_fours(p) ? p.input_blocks() <= kMostOfHub : slices_fit_clusters(p))) return false;
  if (p.n > 128 || rows_in_fours(p)) return p.density() < (p.n > 256 && p.output_blocks() <= 32 ? 0.3 : 0.15);
  return p.density() < (p.output_blocks() >= 256 ? 0.05 : 0.03);
}

// The sums of slices, where clusters add them.
int64_t workspace_bytes(const CudaProblem& p) { return supports(p) ? p.slots * p.n * p.block * 4 : 0; }

}  // namespace blocksparse::gemm::row_wgmma
