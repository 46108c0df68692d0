// How the way `halo` divides a convolution: the rows of an image come to shared memory once for all taps. Pure
// functions of sizes.
#pragma once

#include <optional>

#include "core/ceil_div.h"
#include "gemm/cuda/wgmma/plan.h"
#include "ops/conv/conv.h"
#include "ops/conv/cuda/halo/raster.h"

namespace blocksparse::conv {

// fprop and dgrad: a tile is 64 outputs x 256 or 512 positions, 128 for each warpgroup.
inline constexpr int32_t kHaloOutputs = 64, kHaloHalves = 2;  // jobs of a warpgroup
inline constexpr int32_t kHaloJob = 64;                       // positions, of which thread blocks have runs
inline constexpr int32_t kHaloBuffers = 2;                    // of x
inline constexpr int32_t kMostHaloProductStages = 8;

// Shared memory of an SM: for one thread block, or for each of two.
inline constexpr int32_t kHaloWholeBytes = 226 * 1024, kHaloHalfBytes = 112 * 1024;

struct HaloProductPlan {
  Phase phase;
  Raster raster;
  int64_t tiles, jobs;  // of outputs, and of positions for each
  int32_t rows;         // boxes of positions of x
  int32_t stage_taps;   // taps of a block of W in a stage
  int32_t buffer_bytes, stage_bytes, stages;
  int32_t groups;     // warpgroups that multiply: 2 or 4
  int32_t tile_jobs;  // of a tile of outputs, at once
  int32_t resident;   // thread blocks of an SM

  int32_t shared_bytes() const { return kHaloBuffers * buffer_bytes + stages * stage_bytes; }
};
// Empty if `halo` does not do the product.
std::optional<HaloProductPlan> plan_halo_product(const Product& p);

// Whether `halo` is faster than `gather`, for a product that it does.
bool halo_pays(const Product& p);

// The cost of a job of 64 positions and 64 outputs: kHaloJobCost for its y, and for each block of at most 64 x 64 its x
// and its taps.
inline constexpr int32_t kHaloJobCost = 20;
constexpr int32_t halo_block_cost(int32_t block, int64_t taps) {
  return static_cast<int32_t>(10 + taps * (block == 16 ? 1 : block == 32 ? 2 : 6));
}

// wgrad of up to 3 x 3 taps: a step is 128 positions, a strip is 64 outputs as in wgrad_wgmma, and a patch is
// 32 or 64 inputs with all of their taps.
inline constexpr int64_t kHaloSharedBytes = int64_t{204} * 1024;
inline constexpr int32_t kMostHaloStages = 8;
inline constexpr int32_t kHaloGradientTokens = 128;
inline constexpr int32_t kMostHaloTapRows = 3, kMostHaloTapColumns = 3;  // a row of taps is a warpgroup's
inline constexpr int32_t kHaloSumsOfTap = 32;                            // of a thread
inline constexpr int32_t kHaloIds = 64;                                  // blocks of a job, at most
inline constexpr int32_t kMostHaloStrips = 256, kMostHaloWords = 1024;   // bounds of tables in shared memory
inline constexpr int32_t kLeastHaloSteps = 4;                            // of a thread block

struct HaloGradientForm {
  int32_t patch_inputs, most_patches;  // of a job
};
constexpr HaloGradientForm halo_gradient_form(int32_t block) {
  return block >= 64 ? HaloGradientForm{64, 1} : HaloGradientForm{32, 2};
}

struct HaloGradientPlan {
  Phase phase;
  Raster raster;
  int64_t most_jobs;
  int32_t tap_rows, tap_columns;
  int32_t strips, words;  // strips of outputs; words of 32 patches, for each strip
  int32_t rows;           // positions of x in a box
  int32_t patch_bytes, stage_bytes, stages;

  int64_t steps() const { return ceil_div(raster.positions, kHaloGradientTokens); }
};
// Empty if `halo` does not do the gradient.
std::optional<HaloGradientPlan> plan_halo_gradient(const WeightGradient& g);

// Whether `halo` is faster than the other ways, for a gradient that it does.
bool halo_pays(const WeightGradient& g);

// The parts of the workspace: see jobs.cuh.
struct HaloGradientPlaces {
  int64_t counts, shares, jobs, ids, parts, end;
};
HaloGradientPlaces halo_gradient_places(int64_t taps);

}  // namespace blocksparse::conv
