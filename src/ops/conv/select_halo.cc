#include "ops/conv/select_halo.h"

#include <algorithm>

#include "ops/conv/select_cuda.h"

namespace blocksparse::conv {

namespace {

constexpr int64_t kPattern = 1024;  // after so many bytes swizzles repeat themselves

int64_t divide_up(int64_t value, int64_t step) { return (value + step - 1) / step; }
int64_t whole_patterns(int64_t bytes) { return divide_up(bytes, kPattern) * kPattern; }

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

// Rings of x and of weights. No more stages than there are records while the ring of x goes round: else a feeder could
// wait for its buffer before another has used the same one for the channels in front, and take, by its parity, an older
// phase for the awaited one.
bool fit(HaloProductPlan& plan) {
  constexpr int64_t kRoom = kHaloProductBytes - kHaloStagedBytes, kGoodStages = 6, kLeastStages = 3;
  const int64_t rows = int64_t{linear::form_of(linear::plan_many(plan.problem).kind).tokens} + plan.raster.reach;
  const int64_t bytes = whole_patterns(rows * linear::kChunk * 2);
  const int64_t buffers = kMostHaloBuffers * bytes + kGoodStages * kHaloWeightBytes <= kRoom ? kMostHaloBuffers : 2;
  const int64_t records = buffers * plan.phase.taps.taps();
  const int64_t stages =
      std::min<int64_t>({kMostHaloProductStages, records, (kRoom - buffers * bytes) / kHaloWeightBytes});
  plan.rows = static_cast<int32_t>(rows);
  plan.buffer_bytes = static_cast<int32_t>(bytes);
  plan.buffers = static_cast<int32_t>(buffers);
  plan.stages = static_cast<int32_t>(stages);
  return stages >= kLeastStages;
}

}  // namespace

std::optional<HaloProductPlan> plan_halo_product(const Product& p) {
  const int32_t block = p.layout.block_size;
  if (p.gather.taps() == 1 || phase_count(p.gather) != 1 || p.residual.data != nullptr || block != linear::kChunk) {
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

std::optional<HaloBlocksPlan> plan_halo_blocks(const Product& p) {
  constexpr int64_t kRoom = kHaloProductBytes - kHaloStagedBytes, kLeastStages = 3, kLine = 128;
  constexpr int64_t block = kHaloBlock;
  const int64_t taps = p.gather.taps(), blocks = p.layout.blocks;
  if (taps == 1 || phase_count(p.gather) != 1 || p.residual.data != nullptr || p.gates != nullptr ||
      p.layout.block_size != block || reinterpret_cast<uintptr_t>(p.w) % 16 != 0) {
    return std::nullopt;
  }
  HaloBlocksPlan plan{};
  plan.phase = phase_of(p.gather, p.x, p.y, kHaloBlock, 0);
  const auto raster = raster_of(plan.phase);
  if (!raster || !pays(*raster, p.y.n * p.y.pixels())) return std::nullopt;
  plan.raster = *raster;
  const int64_t rows = int64_t{kHaloBlockTokens} + raster->reach, bytes = whole_patterns(rows * linear::kChunk * 2);
  const int64_t block_bytes = taps * block * block * 2, stages = (kRoom - 2 * bytes) / block_bytes;
  if (stages < kLeastStages) return std::nullopt;
  plan.output_blocks = divide_up(p.y.channels, block);
  plan.tiles = divide_up(p.y.channels, kHaloBlockOutputs);
  plan.rows = static_cast<int32_t>(rows);
  plan.block_bytes = static_cast<int32_t>(block_bytes);
  plan.buffer_bytes = static_cast<int32_t>(bytes);
  plan.buffers = 2;
  plan.stages = static_cast<int32_t>(std::min<int64_t>(kMostHaloProductStages, stages));
  const auto next = [&](int64_t size) {
    const int64_t at = plan.end;
    plan.end += divide_up(size, kLine) * kLine;
    return at;
  };
  plan.records = next(blocks * 16);
  plan.ranges = next(plan.tiles * 8);
  plan.order = next(plan.tiles * 4);
  plan.counter = next(4);
  plan.cells = next(blocks * block_bytes);
  return plan;
}

// us of 256 channels, 64 images, 3 x 3, bf16 on an H200, fprop and dgrad, halo (many), 2026-11-22. 28 x 28, where the
// zeros of the raster make 4 rounds of tiles out of 3    b = 64: density .5 63, 65 (83, 72), .25 42, 40 (49, 35), .12
// 29, 36 (25, 36)   b = 32: .5 91, 91 (83, 79), .25 54, 57 (56, 55), .12 36, 37 (40, 41)    14 x 14    b = 64: .5 23,
// 20 (30, 25), .12 12, 14 (12, 17)   b = 32: .5 28, 28 (33, 32), .12 15, 16 (18, 18)
bool halo_pays(const Product& p, const cuda::Card& card) {
  const auto problem = many_problem(p);
  const auto raster = raster_of(phase_of(p.gather, p.x, p.y, problem.block, 0));
  if (!raster) return false;
  const auto rounds = [&](int64_t positions, int64_t tokens, int64_t outputs) {
    const int64_t tiles = divide_up(positions, tokens) * divide_up(problem.outputs, outputs);
    return divide_up(tiles, card.multiprocessors);
  };
  const linear::ManyForm many = linear::form_of(linear::plan_many(problem).kind);
  const int64_t own = rounds(raster->positions, kHaloBlockTokens, kHaloBlockOutputs);
  if (4 * own <= 5 * rounds(problem.n, many.tokens, many.outputs())) return true;
  const double blocks = static_cast<double>(problem.output_blocks()) * static_cast<double>(problem.input_blocks());
  const double density = static_cast<double>(problem.blocks) / std::max(1.0, blocks);
  return problem.block == kHaloBlock ? density <= 0.3 : density >= 0.2;
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
