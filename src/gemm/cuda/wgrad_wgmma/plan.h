// The family `wgrad_wgmma`: how it divides a weight gradient of many tokens, and the workspace for it. Pure functions
// of sizes.
#pragma once

#include <cstdint>

#include "core/ceil_div.h"
#include "gemm/cuda/wgmma/plan.h"

namespace blocksparse::gemm::wgrad_wgmma {

using wgmma::kChunk;

// The family's row of the table: see families.h.
bool supports(const CudaProblem& p);
int64_t least_tokens(const CudaProblem& p);
bool pays(const CudaProblem& p, const cuda::Card& card);
int64_t workspace_bytes(const CudaProblem& p);

inline constexpr int32_t kMostChunks = 2 * wgmma::kMostChunks;
inline constexpr int64_t kMostStrips = 1 << 16;

// dW is cut into strips of 64 or 128 outputs. A patch is some inputs in which the strip has a block; a job is patches
// of one strip, which share its dy.
struct Form {
  int32_t strip_outputs;
  int32_t patch_inputs;
  int32_t most_patches;  // of a job
  int32_t ids;           // blocks of a patch, at most
  // What a step of a job costs, and what it costs to add up jobs that were cut. The unit is 0.054 us for strips of 128
  // outputs, 0.026 us for b = 64 and 0.08 us for patches of 32 inputs (H200). NOTES.md has times of small and full
  // jobs.
  int32_t fixed_cost, patch_cost, combine_cost;
  int32_t part_bytes;  // a job's sums

  constexpr int32_t cost_of(int32_t job_patches) const {
    // Many patches of 32 inputs are bound by how fast they come, a few by how late. So five and fewer count as five: a
    // strip of 5 patches takes 51 us where thread blocks have equal steps and 62 where they have equal patches (b = 32,
    // density .02).
    if (patch_inputs < kChunk) return fixed_cost + patch_cost * (job_patches > 5 ? job_patches : 5);
    const int32_t quarter = most_patches / 4;  // wgmma takes columns by quarters of a job
    return fixed_cost + patch_cost * round_up(job_patches, quarter);
  }
};

// `wide` is for small blocks that are so many that hardly any patch of 128 x 64 is empty. b = 128 is always wide.
constexpr Form form_of(int32_t block, bool wide) {
  constexpr int32_t kPartBytes = 2 * 128 * 128 * 4;
  if (wide || block == 128) return {128, 64, 4, block > 32 ? 1 : (128 / block) * (64 / block), 1, 4, 170, kPartBytes};
  if (block == 64) return {64, 64, 8, 1, 10, 1, 350, kPartBytes};
  return {64, 32, 16, (64 / block) * (32 / block), 1, 1, 110, kPartBytes};
}
Form form_of(const CudaProblem& p);

struct Plan {
  int64_t strips, chunks;  // of the outputs; of the inputs
  int64_t patches, jobs;   // at most
};
Plan plan_of(const CudaProblem& p, const Form& form);
inline Plan plan_of(const CudaProblem& p) { return plan_of(p, form_of(p)); }

struct WorkspacePlaces {
  int64_t chunks, ids, counts, jobs, shares, parts, gate_parts, end;
};
WorkspacePlaces workspace_places(const CudaProblem& p, const Form& form);

// Thread blocks, one an SM; each may leave two partial sums. A workspace is asked for before a card is known, so this
// is a constant: no card of this architecture has more SMs than an H100 or H200. The 144 SMs of a full GH100 would need
// 37.7 MB for the sums. A convolution of 64 images of 28 x 28 x 256 by an order of channels would need a second slice
// then.
inline constexpr int32_t kMostGrid = 132;

// How many (x, dy) one launch sums. Their maps are arguments of the kernel, which has 4 KB of them.
inline constexpr int32_t kTermsOfLaunch = 12;

}  // namespace blocksparse::gemm::wgrad_wgmma
