#include "ops/linear/select_many.h"

#include <algorithm>

namespace blocksparse::linear {

namespace {

int64_t divide_up(int64_t value, int64_t step) { return (value + step - 1) / step; }

// us of 4096 x 4096, n = 4096, bf16 on an H200, W's copy included: b = 8, density .25: filled 181, cells of 16 343; .1:
// 177 and 180. b = 16, .25: cells of 16 149, of 64 x 16 in a 64 x 64 tile more; 2026-11-21.
ManyKind kind_of(const CudaProblem& p) {
  switch (p.block) {
    case 8: {
      const double grid = static_cast<double>(p.output_blocks()) * static_cast<double>(p.input_blocks());
      return static_cast<double>(p.blocks) >= 0.1 * grid ? ManyKind::filled : ManyKind::cells16;
    }
    case 16: return ManyKind::cells16;
    case 32: return ManyKind::cells32;
    default: return ManyKind::direct;
  }
}

}  // namespace

ManyPlan plan_many(const CudaProblem& p) {
  ManyPlan plan{};
  plan.kind = kind_of(p);
  const ManyForm form = form_of(plan.kind);
  plan.tiles = divide_up(p.outputs, form.outputs());
  plan.chunks = divide_up(p.inputs, kChunk);
  const bool filled = plan.kind == ManyKind::filled;
  plan.records = filled ? plan.tiles * plan.chunks : p.blocks * std::max(1, p.block / kChunk);
  plan.cells = plan.kind == ManyKind::direct ? 0 : filled ? plan.tiles * plan.chunks * form.slots : p.blocks;
  return plan;
}

ManyPlaces many_places(const ManyPlan& plan) {
  constexpr int64_t kLine = 128;
  ManyPlaces at{};
  int64_t next = 0;
  const auto place = [&next](int64_t bytes) {
    const int64_t begin = next;
    next += divide_up(bytes, kLine) * kLine;
    return begin;
  };
  at.records = place(plan.records * 16);
  at.ranges = place(plan.tiles * 8);
  at.order = place(plan.tiles * 4);
  at.counter = place(4);
  at.cells = place(plan.cells * form_of(plan.kind).cell_bytes());
  at.end = next;
  return at;
}

bool many_supports(const CudaProblem& p, const cuda::Card& card) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (p.pass == Pass::wgrad || size_of(p.dtype) != 2 || !card.sm90a) return false;
  if (p.n < kLeastManyTokens || p.gated || !p.w_aligned || !p.x_in_rows) return false;
  if (p.blocks * p.block >= kMost || p.n >= kMost || p.outputs >= kMost) return false;
  const ManyPlan plan = plan_many(p);
  if (plan.chunks > kMostChunks || plan.records >= kMost || plan.cells >= kMost) return false;
  // What W holds beyond the edge must not be multiplied, not even by 0.
  return plan.kind != ManyKind::direct || p.inputs % p.block == 0;
}

}  // namespace blocksparse::linear
