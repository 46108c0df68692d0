// How the way `halo_block` divides wgrad: a cluster of thread blocks for each block of W. Pure functions of sizes.
#pragma once

#include <optional>

#include "cuda/card.h"
#include "ops/conv/conv.h"
#include "ops/conv/cuda/halo/raster.h"

namespace blocksparse::conv {

inline constexpr int32_t kMostHaloBlockStages = 6;
inline constexpr int32_t kMostHaloBlockParts = 8;  // thread blocks of a portable cluster
inline constexpr int32_t kMostHaloBlockTaps = 3;   // along an axis
inline constexpr int32_t kHaloBlockPadding = 8;    // floats behind a row of sums: rows of a warp begin in other banks
inline constexpr int32_t kMostHaloBlockBytes = 203 * 1024;

constexpr int32_t halo_block_tokens(int32_t block) { return block == 64 ? 64 : 128; }  // positions of a step
// The sums of a row of taps.
constexpr int32_t halo_block_sums(int32_t block, int32_t tap_columns) {
  return block * (tap_columns * block + kHaloBlockPadding) * 4;
}

struct HaloBlockPlan {
  Phase phase;
  Raster raster;
  int32_t tap_rows, tap_columns;
  int32_t together;  // rows of taps of a thread block, a warpgroup each: one, or all (b < 64)
  int32_t steps;     // of all parts
  int32_t parts;     // thread blocks of a cluster, each with some of the steps
  int32_t rows;      // positions of x in a box
  int32_t stage_bytes, stages, shared_bytes;
  int64_t clusters;
  int64_t resident;  // thread blocks that run at once
};
// Empty if `halo_block` does not do the gradient.
std::optional<HaloBlockPlan> plan_halo_block(const WeightGradient& g, int32_t multiprocessors);

// Whether `halo_block` is faster than the other ways, for a gradient that it does.
bool halo_block_pays(const WeightGradient& g, int32_t multiprocessors);

}  // namespace blocksparse::conv
