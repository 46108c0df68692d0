#include "gemm/cuda/four_rows_wgmma/plan.h"

#include "gemm/cuda/row_wgmma/plan.h"

namespace blocksparse::gemm::four_rows_wgmma {

namespace {
constexpr int64_t kLeast = 129, kMost = 512;  // tokens
}  // namespace

// Boxes fill x up with zeros behind the last block of inputs, but W may hold anything there.
bool supports(const CudaProblem& p) {
  return row_wgmma::supports(p) && p.block == 32 && !p.by_in && p.outputs == 4 * p.inputs && p.inputs % p.block == 0 &&
         !p.x_first && !p.gated && p.n <= kMost;
}

int64_t least_tokens(const CudaProblem&) { return kLeast; }

// us of 22400 x 5600, 4 %, row_wgmma (four_rows_wgmma), H200, 2026-11-25 (2026-11-22). One list for the four, as gates
// of an LSTM have: n = 128 11.3 (11.5), n = 256 18.9 (17.1), n = 512 35.5 (26.4); a list for each: 11.3 (18.1), 18.9
// (29.4), 35.5 (45.4). Only the card knows which it is. Rows are walked whole, the longest by one thread block: it is
// no longer than there are blocks of inputs.
bool pays(const CudaProblem& p, const cuda::Card&) {
  constexpr int64_t kMostOfHub = 256;
  return p.density() < 0.15 && (p.slots == 0 || p.input_blocks() <= kMostOfHub);
}

int64_t workspace_bytes(const CudaProblem& p) { return supports(p) ? row_wgmma::workspace_bytes(p) : 0; }

}  // namespace blocksparse::gemm::four_rows_wgmma
