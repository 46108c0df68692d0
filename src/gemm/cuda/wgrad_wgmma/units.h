// The units of work of the kernel `many` for wgrad, made anew by every call: see cuda_many_walk.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "blocksparse/status.h"
#include "gemm/cuda/driver.h"
#include "gemm/cuda/wgmma/plan.h"

namespace blocksparse::gemm {

struct alignas(16) GradientUnit {
  int32_t strip;
  int32_t first_cell, cells;
  int32_t reserved;
};

// The units that thread blocks take in turn, the longest first: back and forth, so that who has a long one in a round
// has a short one in the next.
__host__ __device__ constexpr int unit_in_turn(int round, int thread_block, int grid) {
  return round * grid + (round % 2 == 0 ? thread_block : grid - 1 - thread_block);
}

// Where a thread block begins in the units that several share.
struct GradientShare {
  int32_t unit, step;
};

struct GradientTables {
  int32_t* chunks;        // of the inputs, for each cell
  int32_t* ids;           // [cells][rows of blocks][columns of blocks]; -1: there is no block
  int2* counts;           // [strips] first cell, cells
  GradientUnit* units;    // those of most cells first
  GradientShare* shares;  // [grid + 1]; before them {units, of which are not shared}
  float* parts;           // [2 grid][warpgroups][sums of a thread][128 threads]
  float* gate_parts;

  __device__ int2 unit_counts() const { return {shares[0].unit, shares[0].step}; }
  __device__ GradientShare share(int i) const { return shares[1 + i]; }
};

inline GradientTables gradient_tables(const CudaProblem& p, const ManyGradientForm& form, void* workspace) {
  auto* base = static_cast<char*>(workspace);
  const ManyGradientPlaces at = gradient_places(p, form);
  return {.chunks = reinterpret_cast<int32_t*>(base + at.chunks),
          .ids = reinterpret_cast<int32_t*>(base + at.ids),
          .counts = reinterpret_cast<int2*>(base + at.counts),
          .units = reinterpret_cast<GradientUnit*>(base + at.units),
          .shares = reinterpret_cast<GradientShare*>(base + at.shares),
          .parts = reinterpret_cast<float*>(base + at.parts),
          .gate_parts = reinterpret_cast<float*>(base + at.gate_parts)};
}

// For `grid` thread blocks, `steps` of tokens each unit.
Status make_gradient_units(const CudaCall& call, const ManyGradientForm& form, const DeviceWalk& walk,
                           const GradientTables& to, int32_t grid, int32_t steps);
Status prepare_gradient_units();

}  // namespace blocksparse::gemm
