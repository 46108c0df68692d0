// The family `wgrad_wgmma`: how a weight gradient of many tokens is divided, and what that needs of workspace. Pure
// functions of sizes.
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

// wgrad: dW in strips of 64 or 128 outputs, patches of some inputs in which a strip has a block, and jobs of
// patches that share the strip's dy.
struct Form {
  int32_t strip_outputs;
  int32_t patch_inputs;
  int32_t most_patches;  // of a job
  int32_t ids;           // blocks of a patch, at most
  // What a step of a job takes, and adding up jobs that were cut. In 0.054 us for 128 outputs (H200), 0.026 for b =
  // 64, 0.08 for 32 inputs: 4 patches of b = 64 take 46 us where 8 take 59, two of 128 outputs 31 and four 58.
  int32_t fixed_cost, patch_cost, combine_cost;
  int32_t part_bytes;  // a job's sums

  constexpr int32_t cost_of(int32_t job_patches) const {
    // Patches of 32 inputs are bound by how fast they come, a few by how late: 4096 x 4096, n = 4096, b = 32, .02, 5 of
    // a strip, takes 51 us where thread blocks have equal steps and 62 where they have equal patches.
    if (patch_inputs < kChunk) return fixed_cost + patch_cost * (job_patches > 5 ? job_patches : 5);
    const int32_t quarter = most_patches / 4;  // that the tensor cores take
    return fixed_cost + patch_cost * round_up(job_patches, quarter);
  }
};

// `wide`: of small blocks that are so many that patches of that size hardly ever have none. Always so for b = 128.
constexpr Form form_of(int32_t block, bool wide) {
  constexpr int32_t kPartBytes = 2 * 128 * 128 * 4;
  if (wide || block == 128) return {128, 64, 4, block > 32 ? 1 : (128 / block) * (64 / block), 1, 4, 170, kPartBytes};
  if (block == 64) return {64, 64, 8, 1, 10, 1, 350, kPartBytes};
  return {64, 32, 16, (64 / block) * (32 / block), 1, 1, 110, kPartBytes};
}
Form form_of(const CudaProblem& p);

struct Plan {
  int64_t strips, chunks;  // of outputs and of inputs
  int64_t patches, jobs;   // at most
};
Plan plan_of(const CudaProblem& p, const Form& form);
inline Plan plan_of(const CudaProblem& p) { return plan_of(p, form_of(p)); }

struct WorkspacePlaces {
  int64_t chunks, ids, counts, jobs, shares, parts, gate_parts, end;
};
WorkspacePlaces workspace_places(const CudaProblem& p, const Form& form);

// Thread blocks, one an SM; each may leave two partial sums. A workspace is asked for before a card is known, and no
// card of this architecture has more SMs than an H100 or H200. Room for the 144 of a full GH100 would be 37.7 MB for
// the sums: a convolution of 64 images of 28 x 28 x 256 by an order of channels would need a second slice.
inline constexpr int32_t kMostGrid = 132;

// The (x, dy) that one launch sums. Their maps are the kernel's arguments, which have 4 KB.
inline constexpr int32_t kTermsOfLaunch = 12;

}  // namespace blocksparse::gemm::wgrad_wgmma
