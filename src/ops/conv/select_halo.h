// How the way `halo` divides a convolution: an image's rows are brought to shared memory once for all taps. Pure
// functions of sizes.
#pragma once

#include <optional>

#include "ops/conv/conv.h"
#include "ops/conv/raster.h"
#include "ops/linear/select_many.h"

namespace blocksparse::conv {

// fprop and dgrad: the linear op's kernel `many` on a raster, but that x comes once for each chunk of channels. A stage
// of the ring holds weights alone.
inline constexpr int64_t kHaloProductBytes = int64_t{226} * 1024;  // of shared memory
inline constexpr int64_t kHaloStagedBytes = int64_t{32} * 1024;    // of these for y
inline constexpr int64_t kHaloWeightBytes = int64_t{16} * 1024;    // and for a stage
inline constexpr int32_t kMostHaloBuffers = 3;                     // of x
inline constexpr int32_t kMostHaloProductStages = 10;

struct HaloProductPlan {
  Phase phase;
  Raster raster;
  linear::CudaProblem problem;  // of positions; a column of W is a block of channels at one tap
  int32_t rows;                 // positions of x in a box
  int32_t buffer_bytes, buffers, stages;
};
// b = 64. Nothing where it does not do that.
std::optional<HaloProductPlan> plan_halo_product(const Product& p);

// b = 32: a stage holds a block with all of its taps.
inline constexpr int32_t kHaloBlock = 32;
inline constexpr int32_t kHaloBlockTokens = 256, kHaloBlockOutputs = 128;  // of a tile

struct HaloBlocksPlan {
  Phase phase;
  Raster raster;
  int64_t output_blocks, tiles;  // tiles of outputs
  int32_t rows;                  // positions of x in a box
  int32_t block_bytes;           // of W with all taps
  int32_t buffer_bytes, buffers, stages;
  int64_t records, ranges, order, counter, cells, end;  // in the workspace
};
std::optional<HaloBlocksPlan> plan_halo_blocks(const Product& p);

// Whether it is faster than `many`, for what it does.
bool halo_pays(const Product& p, const cuda::Card& card);

inline constexpr int64_t kHaloSharedBytes = int64_t{220} * 1024;
inline constexpr int32_t kMostHaloStages = 8;

// wgrad of 3 x 3 taps: 128 positions a step, strips of 64 outputs as in the linear op's wgrad, cells of 32 or 64 inputs
// with all of their taps.
inline constexpr int32_t kHaloGradientTokens = 128;
inline constexpr int32_t kHaloGradientGroups = 3, kHaloGradientSums = 96;  // warpgroups, and sums of a thread

constexpr linear::ManyGradientForm halo_gradient_form(int32_t block) {
  constexpr int32_t kPartBytes = kHaloGradientGroups * kHaloGradientSums * 128 * 4;
  if (block == 64) return {64, 64, 1, 1, 0, 1, kPartBytes};
  return {64, 32, 2, (64 / block) * (32 / block), 0, 1, kPartBytes};
}

struct HaloGradientPlan {
  Phase phase;
  Raster raster;
  linear::CudaProblem problem;  // of positions and whole blocks
  int32_t rows;                 // positions of x in a box
  int32_t cell_bytes, stage_bytes, stages;

  int64_t steps() const { return (raster.positions + kHaloGradientTokens - 1) / kHaloGradientTokens; }
};
// Nothing where it does not do that.
std::optional<HaloGradientPlan> plan_halo_gradient(const WeightGradient& g);

}  // namespace blocksparse::conv
