// How the kernel `regions` divides a weight gradient: pure functions of sizes and card.
#pragma once

#include <cstdint>

#include "gemm/cuda/select.h"

namespace blocksparse::gemm {

inline constexpr int64_t kLeastRegionTokens = 128;
inline constexpr int32_t kRegionTokens = 32;  // of a stage
inline constexpr int32_t kLeastRegionStages = 2, kMostRegionStages = 4;
inline constexpr int32_t kMostRegionStrips = 64;
inline constexpr int32_t kMostStripUnits = 64;
inline constexpr int32_t kMostStripRows = 128;
inline constexpr int64_t kMostRegionColumns = 8192;  // of blocks: the tables are made in shared memory
inline constexpr int64_t kMostRegionSlices = 4;
inline constexpr int64_t kMostPartialBytes = int64_t{32} << 20;  // of slices: a dW of 4096 x 4096 at density .12

// What a warp holds of dW: 96 to 160 sums a lane. Blocks of 64 and 128 are cells of 32 x 32; of those of 8 two beside
// each other are one cell. Of small cells, whose two products wait for each other, more warps hold less each.
struct RegionForm {
  int32_t cell, cells_of_block, warps, cells_of_warp;
  constexpr int32_t cells() const { return warps * cells_of_warp; }  // of a thread block
};
constexpr RegionForm region_form_of(int32_t block) {
  switch (block) {
    case 8: return {8, 1, 12, 24};
    case 16: return {16, 1, 12, 13};
    default: return {32, block / 32 * (block / 32), 8, 5};
  }
}

// dW in strips of outputs, these in units: inputs with about as many blocks each. The tokens of a unit in slices.
struct RegionPlan {
  int32_t strips = 0, strip_rows = 0;  // of blocks
  int32_t units = 0;                   // of a strip, on average: those with hubs have more
  int32_t slices = 1;
  int32_t stages = kLeastRegionStages;
  int32_t boxes = 0;         // of a stage, for which there is room
  int32_t most_columns = 0;  // of blocks, of a unit: what fits shared memory
};
RegionPlan plan_regions(const CudaProblem& p, const cuda::Card& card);

bool regions_support(const CudaProblem& p);
// Whether it is faster than what there is besides.
bool regions_pay(const CudaProblem& p, const cuda::Card& card);

// A stage holds boxes of 32 tokens x 64 features, swizzled in 128 bytes: first those of dy, then those of x.
inline constexpr int32_t kRegionBoxBytes = kRegionTokens * 64 * 2;
inline constexpr int32_t kMostDyBoxes = 16;  // 64 KB: offsets in them have 12 bits, of 16 bytes
// Of so many blocks side by side; a box begins at a multiple of 64 features, that is of 128 bytes, and the blocks
// anywhere, or at such a multiple too.
constexpr int32_t region_boxes(int64_t blocks, int32_t block, bool aligned = false) {
  const int32_t before = aligned || block > 64 ? 0 : 64 - block;
  return static_cast<int32_t>((before + blocks * block + 63) / 64);
}
constexpr int32_t region_dy_boxes(int64_t strip_rows, int32_t block) {
  return region_boxes(strip_rows, block, strip_rows * block % 64 == 0);
}

struct RegionPlaces {
  int64_t entries, units, counts, partial, end;
};
RegionPlaces region_places(const CudaProblem& p);

}  // namespace blocksparse::gemm
