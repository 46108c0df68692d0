#include "ops/conv/cuda/halo_block/plan.h"

#include <algorithm>

#include "core/ceil_div.h"

namespace blocksparse::conv {

namespace {

constexpr int64_t kShared = int64_t{108} * 1024;  // of a thread block of two on an SM

// One warpgroup for each row of taps shares what is loaded. With few blocks of W a thread block for each row of taps
// fills the card instead.
int32_t rows_together(const WeightGradient& g, int32_t tap_rows, int32_t multiprocessors) {
  return 2 * g.layout.blocks * kMostHaloBlockParts < multiprocessors ? 1 : tap_rows;
}

// As many parts as thread blocks are resident at once, of two steps at least.
int32_t parts_of(const HaloBlockPlan& plan, int32_t block, int32_t multiprocessors) {
  const int64_t resident = int64_t{multiprocessors} * (block == 64 && plan.together > 1 ? 1 : 2);
  int32_t parts = kMostHaloBlockParts;
  while (parts > 1 && (plan.clusters * parts > resident || plan.steps < 2 * parts)) parts /= 2;
  return parts;
}

// Plans as many stages as fit, and returns whether they are enough.
bool fit_stages(HaloBlockPlan& plan, int32_t block) {
  constexpr int64_t kLeastStages = 4;
  const int64_t tokens = halo_block_tokens(block), row_bytes = int64_t{block} * 2;
  const int64_t rows = tokens + int64_t{plan.together - 1} * plan.raster.row_step +
                       int64_t{plan.tap_columns - 1} * plan.raster.column_step;
  const int64_t stage_bytes = tokens * row_bytes + round_up(rows * row_bytes, int64_t{1024});
  const int64_t sums = int64_t{plan.together} * halo_block_sums(block, plan.tap_columns);
  const int64_t room = std::max({kShared, sums, kLeastStages * stage_bytes});
  constexpr int64_t kMostBoxRows = 1024;  // of the copying hardware
  if (room > kMostHaloBlockBytes || rows > kMostBoxRows) return false;
  plan.rows = static_cast<int32_t>(rows);
  plan.stage_bytes = static_cast<int32_t>(stage_bytes);
  plan.stages = static_cast<int32_t>(std::min<int64_t>(kMostHaloBlockStages, room / stage_bytes));
  plan.shared_bytes = static_cast<int32_t>(std::max(plan.stages * stage_bytes, sums));
  return true;
}

}  // namespace

std::optional<HaloBlockPlan> plan_halo_block(const WeightGradient& g, int32_t multiprocessors) {
  const auto [slices, tap_rows, tap_columns] = g.gather.kernel;
  const int32_t block = g.layout.block_size;
  if (slices != 1 || tap_rows > kMostHaloBlockTaps || tap_columns > kMostHaloBlockTaps || g.gathers_rows ||
      g.dgates != nullptr || block < 16 || block > 64 ||
      reinterpret_cast<uintptr_t>(g.dw) % static_cast<size_t>(2 * size_of(g.dw_dtype)) != 0) {
    return std::nullopt;
  }
  HaloBlockPlan plan{};
  plan.phase = phase_of(g.gather, g.columns, g.rows, block, 0);
  const auto raster = raster_of(plan.phase);
  if (!raster || raster->positions == 0) return std::nullopt;
  plan.raster = *raster;
  plan.tap_rows = static_cast<int32_t>(tap_rows);
  plan.tap_columns = static_cast<int32_t>(tap_columns);
  plan.together = rows_together(g, plan.tap_rows, multiprocessors);
  plan.steps = static_cast<int32_t>(ceil_div(raster->positions, int64_t{halo_block_tokens(block)}));
  plan.clusters = g.layout.blocks * (plan.tap_rows / plan.together);
  plan.parts = parts_of(plan, block, multiprocessors);
  if (!fit_stages(plan, block) || plan.clusters * plan.parts >= int64_t{1} << 31) return std::nullopt;
  return plan;
}

}  // namespace blocksparse::conv
