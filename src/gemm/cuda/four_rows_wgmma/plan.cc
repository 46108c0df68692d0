#include "gemm/cuda/four_rows_wgmma/plan.h"

#include "gemm/cuda/row_wgmma/plan.h"

namespace blocksparse::gemm::four_rows_wgmma {

namespace {
constexpr int64_t kLeast = 129, kMost = 512;  // tokens
}  // namespace

// Whole blocks of inputs only: boxes would fill x up with zeros after the last block, but W may hold anything there.
bool supports(const CudaProblem& p) {
  return row_wgmma::supports(p) && p.block == 32 && !p.by_in && p.outputs == 4 * p.inputs && p.inputs % p.block == 0 &&
         !p.x_first && !p.gated && p.n <= kMost;
}

int64_t least_tokens(const CudaProblem&) { return kLeast; }

// It pays if the four lists are equal, as for an LSTM's gates: 22400 x 5600, 4 %, n = 512, H200: 26.4 us, row_wgmma
// 35.5. With a list for each row it loses (45.4 us). Only the card knows which is the case, but a caller knows what is
// likely. NOTES.md has n = 128 and 256.
//
// Rows are walked whole, the longest by one thread block. It is no longer than the number of blocks of inputs.
bool pays(const CudaProblem& p, const cuda::Card&) {
  constexpr int64_t kMostOfHub = 256;
  return p.quarters_are_alike && p.density() < 0.15 && (p.slots == 0 || p.input_blocks() <= kMostOfHub);
}

int64_t workspace_bytes(const CudaProblem& p) { return supports(p) ? row_wgmma::workspace_bytes(p) : 0; }

}  // namespace blocksparse::gemm::four_rows_wgmma
