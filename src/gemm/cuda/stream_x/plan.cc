#include "gemm/cuda/stream_x/plan.h"

#include "gemm/cuda/stream_w/plan.h"

namespace blocksparse::gemm::stream_x {

// The last block of inputs must be whole: boxes fill x up with zeros, but W may hold anything there.
bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 2 * kMostTokens;
  return p.pass != Pass::wgrad && size_of(p.dtype) == 2 && p.block <= 32 && p.n >= 1 && p.n < kMost && p.inputs >= 1 &&
         p.inputs < kMost && p.outputs >= 1 && p.outputs < kMost && p.inputs % p.block == 0 && p.x_in_rows &&
         !p.x_first && p.w_aligned && !p.gated && !p.glu && tiles_of(p, 64) < kMost;
}

// NOTES.md has the table of where stream_x wins. At b = 16 it wins from about 2 to 44 % of the blocks: at 10 % it takes
// 76 us where wgmma takes 100 (4096 x 4096, 4096 tokens, bf16, H200, 2026-11-24). One wave of tiles or less widens the
// limits, because wgmma then fills the card no better.
int64_t least_tokens(const CudaProblem&) { return 256; }

// Tiles of 64 tokens pay while one wave of them does all. 4096 x 4096, b = 32, 25 %, H100: 512 tokens 23.4 us instead
// of 30.4, 640 tokens 38.4 instead of 30.5.
int32_t tokens_of_tile(const CudaProblem& p, const cuda::Card& card) {
  return p.block == 32 && tiles_of(p, 64) <= card.multiprocessors ? 64 : kMostTokens;
}

namespace {

bool pays_with_32(const CudaProblem& p, int64_t tiles, const cuda::Card& card) {
  constexpr int64_t kLeastTiles = 32;
  const double density = p.density();
  if (p.n > 4096 || density >= 0.58) return false;
  if (p.n <= 512 && tokens_of_tile(p, card) == 64) {
    return p.n > 256 && tiles >= 2 * kLeastTiles && density >= (p.n <= 448 ? 0.08 : 0.15);
  }
  // Many rows of blocks fill the card with few tokens: 12288 x 12288, 25 %, 256 tokens, H100: 82.8 us, row_wgmma 113.
  if (p.n < 512) return p.output_blocks() >= 256 && density >= 0.15;
  const bool one_wave = tiles <= card.multiprocessors;
  return tiles >= kLeastTiles && density >= (one_wave && p.n > 512 ? 0.045 : 0.2);
}

}  // namespace

bool pays(const CudaProblem& p, const cuda::Card& card) {
  constexpr int64_t kLeastTiles = 32, kLeastTilesOfFew = 96, kLeastInputs = 1024;
  const int64_t tiles = tiles_of(p, tokens_of_tile(p, card));
  if (p.inputs < kLeastInputs) return false;
  // A warp has a row to its end. A row with a block for every input takes 1 / density times as long as others. Such
  // rows may exist if any row can be cut; tables made on a card do not say that there are none.
  const double density = p.density();
  if (p.slots > 0 && density < 0.05) return false;
  if (p.block == 32) return pays_with_32(p, tiles, card);
  const bool few = p.n < stream_w::kMostTokens;
  if (tiles < (few ? kLeastTilesOfFew : kLeastTiles)) return false;
  if (few && p.block == 8) return false;  // not measured
  const bool one_wave = tiles <= card.multiprocessors;
  if (p.block == 8) return density < (one_wave ? 0.3 : 0.2);
  return density >= 0.015 && density < (one_wave ? 0.55 : 0.44);
}

int64_t workspace_bytes(const CudaProblem&) { return 0; }

}  // namespace blocksparse::gemm::stream_x
