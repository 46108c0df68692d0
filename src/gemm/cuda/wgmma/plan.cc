#include "gemm/cuda/wgmma/plan.h"

#include <algorithm>
#include <limits>

#include "core/ceil_div.h"
#include "core/places.h"
#include "gemm/cuda/stream_w/plan.h"

namespace blocksparse::gemm::wgmma {

namespace {

// The density from which W is filled up. Patches of 64 x 64 take the time of a dense W, whatever they hold: 181 us for
// b = 8, 4096 x 4096, n = 4096, density .25, H200, against 343 with patches of 16. b = 16 and 32 need more blocks
// before that pays: see NOTES.md.
double filled_from(int32_t block) { return block == 8 ? 0.1 : block == 16 ? 0.36 : 0.56; }

Kind kind_of(const CudaProblem& p) {
  if (p.block > 32) return Kind::direct;
  if (p.may_fill && p.density() >= filled_from(p.block)) return Kind::filled;
  return p.block == 32 ? Kind::patches32 : Kind::patches16;
}

}  // namespace

Plan plan_of(const CudaProblem& p) {
  Plan plan{};
  plan.kind = kind_of(p);
  const Form form = form_of(plan.kind);
  plan.tiles = ceil_div(p.outputs, form.outputs());
  plan.chunks = ceil_div(p.inputs, kChunk);
  const bool filled = plan.kind == Kind::filled;
  plan.records = filled ? plan.tiles * plan.chunks : p.blocks * std::max(1, p.block / kChunk);
  plan.patches = plan.kind == Kind::direct ? 0 : filled ? plan.tiles * plan.chunks * form.bands : p.blocks;
  plan.copy_bytes = plan.kind == Kind::direct ? p.blocks * p.block * p.block * 2 : 0;
  const bool fills = filled || p.block == 8;
  plan.note_bytes = fills ? 4 * ceil_div(p.outputs, 64) * ceil_div(p.n, form.tokens) : 0;
  return plan;
}

WorkspacePlaces workspace_places(const Plan& plan, int32_t block) {
  const Form form = form_of(plan.kind);
  WorkspacePlaces at{};
  Places places;
  at.records = places.next(plan.records * 16);
  at.tiles = places.next(plan.tiles * 32);
  at.counter = places.next(4);
  at.sources = places.next(plan.patches * (form.band_outputs / block) * (form.patch_inputs / block) * 8);
  at.patches = places.next(plan.patches * form.patch_bytes());
  at.copy = places.next(plan.copy_bytes);
  at.notes = places.next(plan.note_bytes);
  at.end = places.end;
  return at;
}

bool copies_w(const CudaProblem& p) { return p.gated || !p.w_aligned || p.inputs % p.block != 0; }

bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (p.pass == Pass::wgrad || size_of(p.dtype) != 2 || p.inputs < 1 || p.outputs < 1) return false;
  if (p.n < kLeastTokens || !p.x_in_rows || (p.glu && (p.block < 16 || p.may_fill))) return false;
  if (p.blocks * p.block >= kMost || p.n >= kMost || p.outputs >= kMost) return false;
  const Plan plan = plan_of(p);
  return plan.chunks <= kMostChunks && plan.records < kMost && plan.patches < kMost;
}

// stream_w is faster up to 512 tokens for b <= 32, and below 256 tokens for larger blocks: b = 32, 4096 x 4096, density
// .1, n = 512, H200, 2026-11-21: stream_w 18.6 us, wgmma 24.6. NOTES.md has the table.
int64_t least_tokens(const CudaProblem& p) { return p.block >= 64 ? 256 : stream_w::kMostTokens + 1; }

// Fewer tiles leave SMs without work, which stream_w does not: 1024 x 1024, b = 64 and 128, density .25, n = 512, H100,
// 2026-11-25: stream_w 5.8 us, wgmma 10.6.
bool pays(const CudaProblem& p, const cuda::Card&) {
  constexpr int64_t kLeastTiles = 48;
  return p.block < 64 || ceil_div(p.n, form_of(Kind::direct).tokens) * plan_of(p).tiles >= kLeastTiles;
}

// Sufficient for the last of several launches as well, which has fewer tokens.
int64_t workspace_bytes(const CudaProblem& asked) {
  CudaProblem p = asked;
  p.n = std::min<int64_t>(p.n, std::numeric_limits<int32_t>::max());
  return supports(p) ? workspace_places(plan_of(p), p.block).end : 0;
}

}  // namespace blocksparse::gemm::wgmma
