#include "gemm/cuda/tiled_f32/plan.h"

#include <algorithm>
#include <limits>

#include "core/places.h"

namespace blocksparse::gemm {

namespace {

constexpr int64_t kInt = std::numeric_limits<int32_t>::max();

}  // namespace

int64_t tiled_groups(const CudaProblem& p) { return divide_up(p.output_blocks() * p.block, kTiledOutputs); }

TiledPlaces tiled_places(const CudaProblem& p) {
  const int64_t groups = tiled_groups(p), entries = groups * p.input_blocks();
  TiledPlaces at;
  Places places;
  at.counts = places.next(groups * 4);
  at.inputs = places.next(entries * 4);
  at.weights = places.end;
  at.end = at.weights + entries * (kTiledOutputs / p.block) * 4;
  return at;
}

int32_t tiled_run_blocks(int32_t block) { return block == 128 ? 1 : 256 / block; }

int64_t tiled_runs(const CudaProblem& p) { return p.blocks / tiled_run_blocks(p.block) + p.output_blocks(); }

int64_t tiled_workspace_bytes(const CudaProblem& p) {
  return p.pass == Pass::wgrad ? 64 + tiled_runs(p) * 12 : tiled_places(p).end;
}

bool tiled_supports(const CudaProblem& p) {
  constexpr int64_t kMostTable = int64_t{1} << 26;  // bytes, beside those of W
  const int64_t least = p.pass == Pass::wgrad ? 1 : kFewTokens + 1;
  return p.dtype == DType::f32 && p.n >= least && p.n <= kInt - kTiledTokens && p.w_aligned && p.x_in_rows &&
         !p.x_first && !p.gated && p.pairs == 1 && p.blocks > 0 && std::max(p.inputs, p.outputs) <= kInt - 256 &&
         divide_up(p.n, kTiledTokens) * tiled_groups(p) <= kInt &&
         tiled_workspace_bytes(p) <= kMostTable + p.blocks * p.block * p.block * 4;
}

bool tiled_pays(const CudaProblem& p, const cuda::Card& card) {
  const int64_t tiles = p.pass == Pass::wgrad ? tiled_runs(p) : tiled_groups(p) * divide_up(p.n, kTiledTokens);
  return 4 * tiles >= 3 * card.multiprocessors;
}

}  // namespace blocksparse::gemm
