#include "gemm/cuda/tiled_f32/plan.h"

#include <algorithm>
#include <limits>

#include "core/ceil_div.h"
#include "core/places.h"
#include "gemm/cuda/stream_w/plan.h"
#include "gemm/cuda/wgrad_stream/plan.h"

namespace blocksparse::gemm::tiled_f32 {

namespace {

constexpr int64_t kInt = std::numeric_limits<int32_t>::max();

}  // namespace

int64_t groups_of(const CudaProblem& p) { return ceil_div(p.output_blocks() * p.block, kOutputs); }

WorkspacePlaces workspace_places(const CudaProblem& p) {
  const int64_t groups = groups_of(p), entries = groups * p.input_blocks();
  WorkspacePlaces at;
  Places places;
  at.counts = places.next(groups * 4);
  at.inputs = places.next(entries * 4);
  at.weights = places.end;
  at.end = at.weights + entries * (kOutputs / p.block) * 4;
  return at;
}

int32_t run_blocks(int32_t block) { return block == 128 ? 1 : 256 / block; }

int64_t most_runs(const CudaProblem& p) { return p.blocks / run_blocks(p.block) + p.output_blocks(); }

namespace {

int64_t table_bytes(const CudaProblem& p) {
  return p.pass == Pass::wgrad ? 64 + most_runs(p) * 12 : workspace_places(p).end;
}

// Whether a family that streams W, or x and dy, is faster in tf32. H200, 2026-11-22: 4096 x 4096, fprop, b = 32, 25 %,
// 512 tokens: stream_w 63 us, tiled_f32 115. wgrad, 12288 x 12288, b = 32, 10 %, 512 tokens: wgrad_stream 201 us,
// tiled_f32 182. NOTES.md of stream_w and wgrad_stream have the tables.
bool streams_in_tf32(const CudaProblem& p) {
  if (!p.tf32) return false;
  if (p.pass == Pass::wgrad) return wgrad_stream::supports(p);
  return stream_w::supports(p) && (p.block <= 16 || p.n <= stream_w::kMostTokens);
}

}  // namespace

bool supports(const CudaProblem& p) {
  constexpr int64_t kMostTable = int64_t{1} << 26;  // bytes beyond those of W
  const int64_t least = p.pass == Pass::wgrad ? 1 : stream_w::kTokens + 1;
  return p.dtype == DType::f32 && p.n >= least && p.n <= kInt - kTokens && p.w_aligned && p.x_in_rows && !p.x_first &&
         !p.gated && !p.glu && p.pairs == 1 && p.blocks > 0 && std::max(p.inputs, p.outputs) <= kInt - 256 &&
         ceil_div(p.n, kTokens) * groups_of(p) <= kInt &&
         table_bytes(p) <= kMostTable + p.blocks * p.block * p.block * 4;
}

int64_t least_tokens(const CudaProblem&) { return 1; }

// Not with too few tiles for the card.
bool pays(const CudaProblem& p, const cuda::Card& card) {
  const int64_t tiles = p.pass == Pass::wgrad ? most_runs(p) : groups_of(p) * ceil_div(p.n, kTokens);
  return 4 * tiles >= 3 * card.multiprocessors && !streams_in_tf32(p);
}

int64_t workspace_bytes(const CudaProblem& asked) {
  CudaProblem p = asked;
  p.n = std::min<int64_t>(p.n, kTokens);
  return supports(p) ? table_bytes(p) : 0;
}

}  // namespace blocksparse::gemm::tiled_f32
