#include "ops/conv/cuda/halo/plan.h"

#include <algorithm>

#include "core/ceil_div.h"
#include "core/places.h"
#include "gemm/cuda/wgrad_wgmma/plan.h"
#include "ops/conv/cuda/select.h"

namespace blocksparse::conv {

namespace {

constexpr int64_t kPattern = 1024;  // swizzles repeat after so many bytes

int64_t whole_patterns(int64_t bytes) { return round_up(bytes, kPattern); }

// Zeros between images must cost less than they save.
bool pays(const Raster& raster, int64_t pixels) { return raster.positions <= 2 * pixels; }

// Jobs that a thread block has at once, at most. If there are hardly more jobs than thread blocks, a box of x for four
// would mostly be read in vain: for 8 x 8 pixels and 256 channels it is 276 positions, of which a thread block uses 64
// or 128 besides what taps reach.
int32_t jobs_of_tile(const HaloProductPlan& plan, int32_t groups) {
  constexpr int64_t kThreadBlocks = 264;  // of a card of 132 SMs, two on each
  const int64_t all = plan.tiles * plan.jobs;
  return all <= kThreadBlocks ? 1 : 2 * all <= 3 * kThreadBlocks ? groups : groups * kHaloHalves;
}

// Plans as many stages as fit beside x, and returns whether they are enough. Two thread blocks of three stages each
// take 61 us where one of four warpgroups takes 56 (56 x 56, 128 channels, b = 32, density .25; H200, 2026-11-22).
bool fit(HaloProductPlan& plan, int32_t groups, int32_t resident) {
  const int32_t least_stages = resident == 2 ? 4 : 3;
  const int32_t tile_jobs = jobs_of_tile(plan, groups);
  const int64_t rows = int64_t{tile_jobs} * kHaloJob + plan.raster.reach;
  const int64_t bytes = whole_patterns(rows * gemm::wgmma::kChunk * 2);
  const int64_t room = (resident == 2 ? kHaloHalfBytes : kHaloWholeBytes) - kHaloBuffers * bytes;
  const int64_t stages = std::min<int64_t>(kMostHaloProductStages, room / plan.stage_bytes);
  if (stages < least_stages) return false;
  plan.groups = groups;
  plan.tile_jobs = tile_jobs;
  plan.resident = resident;
  plan.rows = static_cast<int32_t>(rows);
  plan.buffer_bytes = static_cast<int32_t>(bytes);
  plan.stages = static_cast<int32_t>(stages);
  return true;
}

}  // namespace

std::optional<HaloProductPlan> plan_halo_product(const Product& p) {
  constexpr int64_t kMostRows = int64_t{1} << 31;
  const int32_t block = p.layout.block_size, side = std::min(block, kHaloOutputs);
  const int64_t taps = p.gather.taps();
  if (phase_count(p.gather) != 1 || p.residual.data != nullptr || p.gates != nullptr || block < 16 ||
      reinterpret_cast<uintptr_t>(p.w) % 16 != 0 || p.layout.blocks * taps * block >= kMostRows) {
    return std::nullopt;
  }
  HaloProductPlan plan{};
  plan.phase = phase_of(p.gather, p.x, p.y, block, 0);
  const auto raster = raster_of(plan.phase);
  if (!raster || !pays(*raster, p.y.n * p.y.pixels())) return std::nullopt;
  plan.raster = *raster;
  plan.tiles = ceil_div(p.y.channels, kHaloOutputs);
  plan.jobs = ceil_div(raster->positions, kHaloJob);
  if (block == 16 && (plan.phase.x.taps[0] != 3 || plan.phase.x.taps[1] != 3)) return std::nullopt;
  plan.stage_taps = block == 16 ? 9 : block == 32 && taps % 3 == 0 ? 3 : 1;
  plan.stage_bytes = plan.stage_taps * side * side * 2;
  if (!fit(plan, 2, 2) && !fit(plan, 4, 1) && !fit(plan, 2, 1)) return std::nullopt;
  return plan;
}

// NOTES.md has the times of both ways. A tile of gather has twice as many outputs, so it reads less where there are
// many blocks. At b = 16 a block of 9 taps takes 1.0 us of 64 images of 28 x 28. Of small images it takes less, while
// the four kernels of gather take 31 us of 8 x 8 pixels as of 14 x 14 (25 % of the blocks). Both take as long at about
// 13 % of the blocks of 28 x 28, 25 % of 14 x 14 and 50 % of 8 x 8: at half of the density with four times the pixels.
// kMostPairs says that of pixels and blocks, so that wider layers, whose gather takes long, have less.
bool halo_pays(const Product& p) {
  if (p.layout.block_size == gemm::wgmma::kChunk) return true;
  const auto problem = gathered_problem(p);
  const double blocks = static_cast<double>(problem.output_blocks()) * static_cast<double>(problem.input_blocks());
  const double density = static_cast<double>(problem.blocks) / blocks;
  if (problem.block > 16) return density <= 0.4;
  constexpr double kMostPairs = 270000;
  const double pairs = static_cast<double>(p.layout.blocks) * static_cast<double>(problem.n);
  return density <= 0.13 || density * pairs <= kMostPairs;
}

std::optional<HaloGradientPlan> plan_halo_gradient(const WeightGradient& g) {
  const auto [slices, tap_rows, tap_columns] = g.gather.kernel;
  const int32_t block = g.layout.block_size, of_strip = std::max(block, 64);
  if (slices != 1 || tap_rows > kMostHaloTapRows || tap_columns > kMostHaloTapColumns || g.gathers_rows ||
      g.gates != nullptr || g.dgates != nullptr ||
      reinterpret_cast<uintptr_t>(g.dw) % static_cast<size_t>(2 * size_of(g.dw_dtype)) != 0) {
    return std::nullopt;
  }
  HaloGradientPlan plan{};
  plan.phase = phase_of(g.gather, g.columns, g.rows, block, 0);
  const auto raster = raster_of(plan.phase);
  if (!raster || !pays(*raster, g.rows.n * g.rows.pixels())) return std::nullopt;
  plan.raster = *raster;
  const HaloGradientForm form = halo_gradient_form(block);
  const int64_t strips = ceil_div(g.rows.channels, of_strip) * (of_strip / 64);  // strips of whole blocks
  const int64_t chunks = ceil_div(g.columns.channels, form.patch_inputs), words = ceil_div(chunks, 32);
  if (strips > kMostHaloStrips || strips * words > kMostHaloWords) return std::nullopt;
  const int64_t most_patches = std::min(strips * chunks, g.layout.blocks * (of_strip / 64) * (of_strip / 64));
  const int64_t rows = int64_t{kHaloGradientTokens} + raster->reach;
  const int64_t patch_bytes = whole_patterns(rows * form.patch_inputs * 2);
  const int64_t stage_bytes = kHaloGradientTokens * 128 + patch_bytes * form.most_patches;
  const int64_t stages = std::min<int64_t>(kMostHaloStages, kHaloSharedBytes / stage_bytes);
  if (stages < 2) return std::nullopt;
  plan.most_jobs = std::max<int64_t>(1, most_patches / form.most_patches + std::min(strips, most_patches));
  plan.tap_rows = static_cast<int32_t>(tap_rows);
  plan.tap_columns = static_cast<int32_t>(tap_columns);
  plan.strips = static_cast<int32_t>(strips);
  plan.words = static_cast<int32_t>(words);
  plan.rows = static_cast<int32_t>(rows);
  plan.patch_bytes = static_cast<int32_t>(patch_bytes);
  plan.stage_bytes = static_cast<int32_t>(stage_bytes);
  plan.stages = static_cast<int32_t>(stages);
  return plan;
}

// A gradient of one tap is an ordinary product, too, whose jobs share their dy among 512 inputs. Its tables, and parts
// of 128 KB, cost more than dW if there are only few blocks. Then a job here reads the rest once more at most.
bool halo_pays(const WeightGradient& g) {
  constexpr int64_t kLeastTokens = 4096, kOfJob = 64 + 64;  // channels: dy, x
  if (g.gather.taps() > 1) return true;
  const auto plan = plan_halo_gradient(g);
  return plan && g.rows.n * g.rows.pixels() >= kLeastTokens &&
         plan->most_jobs * kOfJob <= 2 * (g.rows.channels + g.columns.channels);
}

HaloGradientPlaces halo_gradient_places(int64_t taps) {
  constexpr int64_t kGrid = gemm::wgrad_wgmma::kMostGrid;
  HaloGradientPlaces at{};
  Places places;
  at.counts = places.next(16);
  at.shares = places.next((kGrid + 1) * 8);
  at.jobs = places.next(kGrid * 16);
  at.ids = places.next(kGrid * kHaloIds * 4);
  at.parts = places.next(2 * kGrid * taps * kHaloSumsOfTap * 128 * 4);
  at.end = places.end;
  return at;
}

}  // namespace blocksparse::conv
