#include "ops/conv/cuda/halo_block/plan.h"

#include <algorithm>

#include "core/ceil_div.h"

namespace blocksparse::conv {

namespace {

constexpr int64_t kShared = int64_t{108} * 1024;  // stages of a thread block of two on an SM
constexpr int64_t kMostSlack = int64_t{3} * 1024;
// An SM has 228 KB. Each thread block takes 1 KB for its barriers and 1 KB for the system.
static_assert(2 * (kShared + kMostSlack + 2 * 1024) <= 228 * 1024);

// With so many blocks of W that clusters of 8 no longer have an SM for each thread block, rows of taps apart are still
// resident at once in clusters of 4. us of 64 images, three rows together and apart, H100, 2026-11-26:
//   b    blocks   8 x 8         14 x 14       28 x 28
//   32   15       13.0, 12.1
//   32   16       18.8, 12.3    30.0, 23.4
//   32   20       19.1, 12.9
//   32   22       19.2, 21.2    30.2, 41.8
//   16   18       13.0, 10.1    19.8, 19.6    50.3, 67.0
// The ways other than halo_block take 24.6 us and more. Kernels of two rows of taps have not been timed apart.
bool rows_are_apart(const WeightGradient& g, int64_t steps, int32_t tap_rows, int32_t multiprocessors) {
  constexpr int64_t kParts = 4, kMostSteps = 128, kEmpty = 12;  // SMs of GPCs that a cluster does not fit in
  const int64_t places = multiprocessors - kEmpty, blocks = g.layout.blocks;
  return tap_rows == 3 && g.layout.block_size < 64 && steps <= kMostSteps && blocks * kMostHaloBlockParts > places &&
         blocks * tap_rows * kParts <= 2 * places;
}

// One warpgroup for each row of taps shares what is loaded. With few blocks of W a thread block for each row of taps
// fills the card instead. So does one at b = 64: three warpgroups of such blocks leave room for one thread block on an
// SM, and take 41.5 us where gather takes 29.4 (7 x 7, 512 channels, 25 %, H200, 2026-11-26).
int32_t rows_together(const WeightGradient& g, int64_t steps, int32_t tap_rows, int32_t multiprocessors) {
  const bool few = 2 * g.layout.blocks * kMostHaloBlockParts < multiprocessors;
  const bool apart = few || g.layout.block_size == 64 || rows_are_apart(g, steps, tap_rows, multiprocessors);
  return apart ? 1 : tap_rows;
}

// As many parts as thread blocks are resident at once, of two steps at least.
int32_t parts_of(const HaloBlockPlan& plan) {
  int32_t parts = kMostHaloBlockParts;
  while (parts > 1 && (plan.clusters * parts > plan.resident || plan.steps < 2 * parts)) parts /= 2;
  return parts;
}

// Steps of a thread block up to which the kernel pays. With few blocks `halo` has an SM for each of its jobs.
int32_t most_steps(int32_t block, bool several_taps, bool few_blocks) {
  if (block == 16) return several_taps ? 54 : 32;
  if (block == 32) return several_taps ? 24 : 50;
  if (several_taps) return few_blocks ? 48 : 64;
  return 16;
}

// Bytes behind the last stage that compute-sanitizer takes for read. Columns of several taps overlap in memory: 16
// positions of `tap_columns` taps end with the box, but memcheck counts tap_columns * block * 16 elements one after the
// other.
int64_t slack_of(const HaloBlockPlan& plan, int32_t block, int64_t box_bytes) {
  const int64_t rows =
      halo_block_tokens(block) + int64_t{plan.together - 1} * plan.raster.row_step + int64_t{plan.tap_columns - 1} * 16;
  return std::max(int64_t{0}, rows * block * 2 - box_bytes);
}

// Plans as many stages as fit, and returns whether they are enough.
bool fit_stages(HaloBlockPlan& plan, int32_t block) {
  constexpr int64_t kLeastStages = 4;
  const int64_t tokens = halo_block_tokens(block), row_bytes = int64_t{block} * 2;
  const int64_t rows = tokens + int64_t{plan.together - 1} * plan.raster.row_step +
                       int64_t{plan.tap_columns - 1} * plan.raster.column_step;
  const int64_t box_bytes = round_up(rows * row_bytes, int64_t{1024});
  const int64_t stage_bytes = tokens * row_bytes + box_bytes, slack = slack_of(plan, block, box_bytes);
  const int64_t sums = int64_t{plan.together} * halo_block_sums(block, plan.tap_columns);
  const int64_t room = std::max(kShared, kLeastStages * stage_bytes);
  constexpr int64_t kMostBoxRows = 1024;  // of the copying hardware
  if (room + slack > kMostHaloBlockBytes || rows > kMostBoxRows) return false;
  plan.rows = static_cast<int32_t>(rows);
  plan.stage_bytes = static_cast<int32_t>(stage_bytes);
  plan.stages = static_cast<int32_t>(std::min<int64_t>(kMostHaloBlockStages, room / stage_bytes));
  plan.shared_bytes = static_cast<int32_t>(std::max(plan.stages * stage_bytes + slack, sums));
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
  plan.steps = static_cast<int32_t>(ceil_div(raster->positions, int64_t{halo_block_tokens(block)}));
  plan.together = rows_together(g, plan.steps, plan.tap_rows, multiprocessors);
  plan.clusters = g.layout.blocks * (plan.tap_rows / plan.together);
  if (!fit_stages(plan, block)) return std::nullopt;
  plan.resident = int64_t{multiprocessors} * (plan.shared_bytes <= kShared + kMostSlack ? 2 : 1);
  plan.parts = parts_of(plan);
  if (plan.clusters * plan.parts >= int64_t{1} << 31) return std::nullopt;
  return plan;
}

// us of wgrad of 64 images by this kernel and by the way that is chosen otherwise, around most_steps; bf16, H100,
// 2026-11-26:
//   b    taps    steps   us           images, channels, density
//   16   3 x 3   29      41.9, 47.3   14 x 14, 256, 25 %
//   16   3 x 3   53      51.9, 74.5   28 x 28, 256, 10 %
//   16   3 x 3   56      75.2, 66.5   20 x 20, 256, 25 %
//   16   1 x 1   32      19.6, 21.4   8 x 8, 256, dense
//   16   1 x 1   50      40.4, 31.8   20 x 20, 256, 25 %
//   16   1 x 1   49      37.7, 43.9   28 x 28, 256, 10 %, not chosen
//   32   3 x 3   15      45.9, 45.3   14 x 14, 256, 50 %, the worst that is chosen
//   32   3 x 3   19      34.6, 34.8   16 x 16, 256, 25 %
//   32   3 x 3   28      47.4, 42.7   20 x 20, 256, 25 %
//   32   1 x 1   49      33.9, 39.0   28 x 28, 256, 25 %
//   64   3 x 3   37      23.9, 26.5   16 x 16, 256, 25 %; 10 %: 23.6, 22.8; 50 %: 32.2, 36.8
//   64   3 x 3   56      31.8, 30.0   20 x 20, 256, 25 %; 10 %: 31.3, 25.4; 50 %: 43.4, 43.8; not chosen
//   64   3 x 3   57      39.9, 49.2   14 x 14, 256, dense
//   64   3 x 3   64      39.3, 87.2   7 x 7, 512, dense
//   64   3 x 3   106     53.0, 39.0   28 x 28, 256, 25 %
//   64   1 x 1   13      9.8, 11.3    10 x 10, 256, 25 %
//   64   1 x 1   25      13.8, 11.6   14 x 14, 256, 25 %
// At b = 64 and one tap two thread blocks on an SM lose to wgrad_block: 16.0, 12.7 (7 x 7, 512 channels, 50 %).
// More blocks than thread blocks are resident, and one tap of less than 2048 pixels, have not been measured.
bool halo_block_pays(const WeightGradient& g, int32_t multiprocessors) {
  constexpr int64_t kLeastPixels = 2048;
  const auto plan = plan_halo_block(g, multiprocessors);
  if (!plan || plan->clusters > plan->resident) return false;
  const int32_t block = g.layout.block_size;
  const bool several_taps = g.gather.taps() > 1;
  if (!several_taps) {
    if (g.rows.n * g.rows.pixels() < kLeastPixels) return false;
    if (block == 64 && plan->clusters * plan->parts > multiprocessors) return false;
  }
  if (rows_are_apart(g, plan->steps, plan->tap_rows, multiprocessors)) return true;
  const bool few_blocks = plan->parts == kMostHaloBlockParts;
  return ceil_div(plan->steps, plan->parts) <= most_steps(block, several_taps, few_blocks);
}

}  // namespace blocksparse::conv
