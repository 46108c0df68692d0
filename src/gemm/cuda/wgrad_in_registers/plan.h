// The family `wgrad_in_registers`: how it divides a weight gradient. Pure functions of sizes and card.
#pragma once

#include <cstdint>

#include "core/ceil_div.h"
#include "gemm/cuda/problem.h"

namespace blocksparse::gemm::wgrad_in_registers {

// The family's row of the table: see families.h.
bool supports(const CudaProblem& p);
int64_t least_tokens(const CudaProblem& p);
bool pays(const CudaProblem& p, const cuda::Card& card);
int64_t workspace_bytes(const CudaProblem& p);

inline constexpr int64_t kLeastTokens = 128;
inline constexpr int32_t kTokens = 32;  // of a stage
inline constexpr int32_t kLeastStages = 2, kMostStages = 4;
inline constexpr int32_t kMostStrips = 64;
inline constexpr int32_t kMostStripJobs = 64;
inline constexpr int32_t kMostStripRows = 128;
inline constexpr int64_t kMostColumns = 8192;  // of blocks: the tables are made in shared memory
inline constexpr int64_t kMostSlices = 4;
inline constexpr int64_t kMostPartialBytes = int64_t{32} << 20;  // of slices: a dW of 4096 x 4096 at density .12

// What a warp holds of dW: 96 to 160 sums a lane. At b = 64 and 128 a block is several patches of 32 x 32; at b = 8 two
// neighbouring blocks are one patch. The two products of a small patch wait for each other, so more warps hold fewer
// sums each.
struct Form {
  int32_t patch, patches_of_block, warps, patches_of_warp;
  constexpr int32_t patches() const { return warps * patches_of_warp; }  // of a thread block
};
constexpr Form form_of(int32_t block) {
  switch (block) {
    case 8: return {8, 1, 12, 24};
    case 16: return {16, 1, 12, 13};
    default: return {32, block / 32 * (block / 32), 8, 5};
  }
}

// dW is cut into strips of outputs, a strip into jobs of inputs with about as many blocks each, and the tokens of a job
// into slices.
struct Plan {
  int32_t strips = 0, strip_rows = 0;  // of blocks
  int32_t jobs = 0;                    // of a strip, on average: a strip with hubs has more
  int32_t slices = 1;
  int32_t stages = kLeastStages;
  int32_t boxes = 0;         // of a stage
  int32_t most_columns = 0;  // of blocks, of a job: what fits into shared memory
};
Plan plan_of(const CudaProblem& p, const cuda::Card& card);

// A stage holds boxes of 32 tokens x 64 features, swizzled in 128 bytes: first those of dy, then those of x.
inline constexpr int32_t kBoxBytes = kTokens * 64 * 2;
inline constexpr int32_t kMostDyBoxes = 16;  // 64 KB: an offset in them has 12 bits, in units of 16 bytes
// The boxes of so many blocks side by side. A box begins at a multiple of 64 features, that is of 128 bytes. The blocks
// begin anywhere, or with `aligned` at such a multiple too.
constexpr int32_t boxes_of(int64_t blocks, int32_t block, bool aligned = false) {
  const int32_t before = aligned || block > 64 ? 0 : 64 - block;
  return static_cast<int32_t>(ceil_div(before + blocks * block, 64));
}
constexpr int32_t dy_boxes_of(int64_t strip_rows, int32_t block) {
  return boxes_of(strip_rows, block, strip_rows * block % 64 == 0);
}

struct WorkspacePlaces {
  int64_t entries, jobs, counts, partial, end;
};
WorkspacePlaces workspace_places(const CudaProblem& p);

// Whether it is faster than wgrad_wgmma, or there is no wgrad_wgmma.
bool pays_beside_wgmma(const CudaProblem& p, const cuda::Card& card);

}  // namespace blocksparse::gemm::wgrad_in_registers
