#include "gemm/cuda/wgrad_block/plan.h"

#include "core/ceil_div.h"
#include "gemm/cuda/wgrad_wgmma/plan.h"

namespace blocksparse::gemm::wgrad_block {

namespace {
int64_t thread_blocks_of_sm(const CudaProblem& p, const cuda::Card& card) {
  return ceil_div(p.blocks, card.multiprocessors);
}
}  // namespace

// Figures are in NOTES.md. One thread block an SM has room for long stages; several had better be more. Neighbours in a
// long row share dy, which counts where every SM has enough of them.
Ring ring_of(const CudaProblem& p, const cuda::Card& card) {
  const int64_t each = thread_blocks_of_sm(p, card);
  if (each <= 1) return {.tokens = 64, .stages = 6};
  if (p.block == 128) return {.tokens = 32, .stages = 6};
  if (each >= 5 && p.blocks >= 12 * p.output_blocks()) return {.tokens = 32, .stages = 6, .blocks = 2};
  return {.tokens = 32, .stages = each > 10 ? 5 : 6};
}

bool copies(const CudaProblem& p, const cuda::Card& card) {
  return p.pairs == 1 && (p.block == 128 || p.n <= 64 || (p.n <= 256 && thread_blocks_of_sm(p, card) <= 10));
}

bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 31;
  return p.pass == Pass::wgrad && size_of(p.dtype) == 2 && p.block >= 64 && p.n >= 1 && p.inputs >= 1 &&
         p.outputs >= 1 && p.x_in_rows && p.w_aligned && !p.x_first && !p.gated &&
         p.pairs <= wgrad_wgmma::kTermsOfLaunch && p.blocks < kMost && p.n < kMost && p.outputs < kMost &&
         p.inputs < kMost;
}

int64_t least_tokens(const CudaProblem&) { return 1; }

// Each block, or each two, reads its x and dy. wgrad_wgmma reads less of nearly dense matrices and of more tokens than
// L2 holds, and cuts the tokens where blocks are few. H200, n = 8192, us here and there: b = 64, 1024 blocks 170, 142;
// b = 128, 576 blocks 285, 245; 20 blocks 47, 36. Where few outputs have many inputs, dy stays in L2: b = 64, 4096
// outputs of 14336 inputs, 10 %, H100 303, 380; of as many blocks of 14336 outputs 331, 281.
bool pays(const CudaProblem& p, const cuda::Card& card) {
  const int64_t sms = card.multiprocessors;
  const bool wide = p.block == 64 && p.inputs >= 3 * p.outputs && p.density() < 0.15;
  if (p.n > 4096 && ((p.blocks > 4 * sms && !wide) || 4 * p.blocks < sms)) return false;
  return p.block == 128 || p.n <= 2048 || p.blocks < 24 * p.output_blocks();
}

int64_t workspace_bytes(const CudaProblem&) { return 0; }

}  // namespace blocksparse::gemm::wgrad_block
