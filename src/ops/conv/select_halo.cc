#include "ops/conv/select_halo.h"

#include <algorithm>

#include "ops/conv/select_cuda.h"

namespace blocksparse::conv {

namespace {

constexpr int64_t kPattern = 1024;  // after so many bytes swizzles repeat themselves

int64_t whole_patterns(int64_t bytes) { return (bytes + kPattern - 1) / kPattern * kPattern; }

linear::CudaProblem gradient_problem(const WeightGradient& g, const Raster& raster) {
  linear::CudaProblem p;
  p.pass = Pass::wgrad;
  p.dtype = g.dtype;
  p.block = g.layout.block_size;
  p.blocks = g.layout.blocks;
  p.n = raster.positions;
  p.inputs = g.columns.channels;
  p.outputs = g.rows.channels;
  p.w_aligned = reinterpret_cast<uintptr_t>(g.dw) % static_cast<size_t>(2 * size_of(g.dw_dtype)) == 0;
  return p;
}

// Zeros between images must not cost more than they save.
bool pays(const Raster& raster, int64_t pixels) { return raster.positions <= 2 * pixels; }

// Rings of x and of weights.
bool fit(HaloProductPlan& plan) {
  constexpr int64_t kRoom = kHaloProductBytes - kHaloStagedBytes, kGoodStages = 6, kLeastStages = 3;
  const int64_t rows = int64_t{linear::form_of(linear::plan_many(plan.problem).kind).tokens} + plan.raster.reach;
  const int64_t bytes = whole_patterns(rows * linear::kChunk * 2);
  const int64_t buffers = kMostHaloBuffers * bytes + kGoodStages * kHaloWeightBytes <= kRoom ? kMostHaloBuffers : 2;
  const int64_t stages = std::min<int64_t>(kMostHaloProductStages, (kRoom - buffers * bytes) / kHaloWeightBytes);
  plan.rows = static_cast<int32_t>(rows);
  plan.buffer_bytes = static_cast<int32_t>(bytes);
  plan.buffers = static_cast<int32_t>(buffers);
  plan.stages = static_cast<int32_t>(stages);
  return stages >= kLeastStages;
}

}  // namespace

std::optional<HaloProductPlan> plan_halo_product(const Product& p) {
  const int32_t block = p.layout.block_size;
  if (p.gather.taps() == 1 || phase_count(p.gather) != 1 || p.residual.data != nullptr || block > linear::kChunk) {
    return std::nullopt;
  }
  HaloProductPlan plan{};
  plan.phase = phase_of(p.gather, p.x, p.y, block, 0);
  const auto raster = raster_of(plan.phase);
  if (!raster || !pays(*raster, p.y.n * p.y.pixels())) return std::nullopt;
  plan.raster = *raster;
  plan.problem = many_problem(p);
  plan.problem.n = raster->positions;
  if (!linear::many_supports(plan.problem) || !fit(plan)) return std::nullopt;
  return plan;
}

std::optional<HaloGradientPlan> plan_halo_gradient(const WeightGradient& g) {
  const SpatialSizes taps = {1, 3, 3};
  const int32_t block = g.layout.block_size;
  if (g.gather.kernel != taps || g.gathers_rows || g.gates != nullptr || g.dgates != nullptr || block > 64) {
    return std::nullopt;
  }
  HaloGradientPlan plan{};
  plan.phase = phase_of(g.gather, g.columns, g.rows, block, 0);
  const auto raster = raster_of(plan.phase);
  if (!raster || !pays(*raster, g.rows.n * g.rows.pixels())) return std::nullopt;
  plan.raster = *raster;
  plan.problem = gradient_problem(g, *raster);
  if (!linear::many_supports(plan.problem)) return std::nullopt;
  const linear::ManyGradientForm form = halo_gradient_form(block);
  const int64_t rows = int64_t{kHaloGradientTokens} + raster->reach;
  const int64_t cell_bytes = whole_patterns(rows * form.cell_inputs * 2);
  const int64_t stage_bytes = kHaloGradientTokens * 128 + cell_bytes * form.most_cells;
  const int64_t stages = std::min<int64_t>(kMostHaloStages, kHaloSharedBytes / stage_bytes);
  if (stages < 2) return std::nullopt;
  plan.rows = static_cast<int32_t>(rows);
  plan.cell_bytes = static_cast<int32_t>(cell_bytes);
  plan.stage_bytes = static_cast<int32_t>(stage_bytes);
  plan.stages = static_cast<int32_t>(stages);
  return plan;
}

}  // namespace blocksparse::conv
