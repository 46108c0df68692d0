#include "gemm/cuda/wgmma/plan.h"

#include <algorithm>
#include <cmath>

#include "core/places.h"

namespace blocksparse::gemm {

namespace {

// Cells of 64 x 64 take the time of a dense W, whatever they hold. us of 4096 x 4096, n = 4096, bf16 on an H200, W's
// copy included: b = 8, density .25: filled 181, cells of 16 343; .1: 177 and 180. b = 16, .1: cells of 16 98, of 64 x
// 16 127; cells of the block's own size, b = 16: 150 at .25, 262 at .5; b = 32: 108 at .25, 180 at .5, 230 at .65;
// filled 198 to 202 for both; 2026-11-22.
double filled_from(int32_t block) { return block == 8 ? 0.1 : block == 16 ? 0.36 : 0.56; }

ManyKind kind_of(const CudaProblem& p) {
  if (p.block > 32) return ManyKind::direct;
  const double grid = static_cast<double>(p.output_blocks()) * static_cast<double>(p.input_blocks());
  if (p.may_fill && static_cast<double>(p.blocks) >= filled_from(p.block) * grid) return ManyKind::filled;
  return p.block == 32 ? ManyKind::cells32 : ManyKind::cells16;
}

// What a cell of 128 x 64 takes of the time of one of 64 x 32. us of 4096 x 4096, n = 4096, bf16 on an H200, wide
// (narrow): b = 8, density .5, .25, .1: 225 (350), 215 (349), 209 (337); b = 16, .25, .1: 205 (319), 203 (210); b = 32,
// .5, .32, .25: 204 (261), 207 (200), 199 (160); 14336 x 4096, n = 8192, b = 32, .25: 1332 (1119); 2026-11-22.
constexpr double kWideCell = 2.3;

// Cells that have a block, if blocks are at random.
double random_cells(const CudaProblem& p, const ManyGradientForm& form) {
  const double grid = static_cast<double>(p.output_blocks()) * static_cast<double>(p.input_blocks());
  const double empty = std::max(0.0, 1 - static_cast<double>(p.blocks) / std::max(1.0, grid));
  const auto cells =
      static_cast<double>(divide_up(p.outputs, form.strip_outputs) * divide_up(p.inputs, form.cell_inputs));
  return cells * (1 - std::pow(empty, form.ids));
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
  plan.copy_bytes = plan.kind == ManyKind::direct ? p.blocks * p.block * p.block * 2 : 0;
  return plan;
}

ManyPlaces many_places(const ManyPlan& plan, int32_t block) {
  const ManyForm form = form_of(plan.kind);
  ManyPlaces at{};
  Places places;
  at.records = places.next(plan.records * 16);
  at.tiles = places.next(plan.tiles * 32);
  at.counter = places.next(4);
  at.sources = places.next(plan.cells * (form.slot_outputs / block) * (form.cell_inputs / block) * 8);
  at.cells = places.next(plan.cells * form.cell_bytes());
  at.copy = places.next(plan.copy_bytes);
  at.end = places.end;
  return at;
}

ManyGradientForm gradient_form_of(const CudaProblem& p) {
  const ManyGradientForm narrow = gradient_form_of(p.block, false), wide = gradient_form_of(p.block, true);
  return p.block <= 32 && kWideCell * random_cells(p, wide) < random_cells(p, narrow) ? wide : narrow;
}

ManyGradientPlan plan_gradient(const CudaProblem& p, const ManyGradientForm& form) {
  ManyGradientPlan plan{};
  plan.strips = divide_up(p.outputs, form.strip_outputs);
  // Of whole blocks: a block of 128 has both of its cells, also where the second lies beyond the edge.
  const int32_t step = std::max(p.block, form.cell_inputs);
  plan.chunks = divide_up(p.inputs, step) * (step / form.cell_inputs);
  plan.cells = std::min(plan.strips * plan.chunks, p.blocks * std::max(1, p.block / form.cell_inputs));
  plan.units = plan.cells / (form.most_cells / 2) + plan.strips;  // there may be as many of half the cells
  return plan;
}

ManyGradientPlaces gradient_places(const CudaProblem& p, const ManyGradientForm& form) {
  const ManyGradientPlan plan = plan_gradient(p, form);
  ManyGradientPlaces at{};
  Places places;
  at.chunks = places.next(plan.cells * 4);
  at.ids = places.next(plan.cells * form.ids * 4);
  at.counts = places.next(plan.strips * 8);
  at.units = places.next(plan.units * 16);
  at.shares = places.next((kMostGradientGrid + 2) * 8);
  at.parts = places.next(int64_t{2} * kMostGradientGrid * form.part_bytes);
  at.gate_parts = places.next(p.blocks * std::max(1, p.block / 16) * (p.block / 8) * 4);
  at.end = places.end;
  return at;
}

namespace {

bool many_gradient_supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 31;
  const ManyGradientPlan plan = plan_many_gradient(p);
  return p.w_aligned && p.pairs <= kMostManyTerms && plan.chunks <= kMostGradientChunks &&
         plan.cells * gradient_form_of(p).ids < kMost && plan.strips <= kMostStrips;
}

}  // namespace

bool many_copies(const CudaProblem& p) { return p.gated || !p.w_aligned || p.inputs % p.block != 0; }

bool many_supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (size_of(p.dtype) != 2 || p.inputs < 1 || p.outputs < 1) return false;
  if (p.n < kLeastManyTokens || !p.x_in_rows) return false;
  if (p.blocks * p.block >= kMost || p.n >= kMost || p.outputs >= kMost) return false;
  if (p.pass == Pass::wgrad) return many_gradient_supports(p);
  const ManyPlan plan = plan_many(p);
  return plan.chunks <= kMostChunks && plan.records < kMost && plan.cells < kMost;
}

// us of 4096 x 4096, bf16, H200, few (many), 2026-11-21.
//   fprop of 128, 256 and 512 tokens, density .1    b = 128: 7.5 (13.9), 10.9 (14.1), 18.9 (14.4)   b = 64: 7.0 (13.0),
//     12.1 (13.1), 19.5 (13.7)   b = 32: 6.8 (24.3), 12.0 (24.3), 18.6 (24.6)   b = 16: 9.3 (30.8), 15.0 (30.8), 25.6
//     (31.2)   b = 8: 10.6 (64.2), 17.4 (64.3), 31.6 (64.6)
//   of 256 and 512, density .25    b = 64: 19.6 (18.7), 33.3 (19.5)   b = 32: 20.3 (36.3), 33.4 (36.5)
//   12288 x 12288, density .05, of 256 and 512    b = 64: 33.0 (19.4), 67.8 (30.8)   b = 32: 31.8 (48.1), 63.1 (77.4)
// wgrad of 512 and 1024, density .1, generic (many)    b = 64: 26.2 (27.6), 41.9 (33.6)   b = 16: 59.5 (70.5), 104
// (101)
bool many_pays(const CudaProblem& p) {
  if (p.pass == Pass::wgrad) return p.n >= 1024 && (p.pairs == 1 || p.block >= 32 || p.n >= 1024 * p.pairs);
  return p.n >= (p.block >= 64 ? 256 : kMostFewTokens + 1);
}

}  // namespace blocksparse::gemm
