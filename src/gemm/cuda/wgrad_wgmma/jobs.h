// The jobs of the kernel `wgrad_wgmma`, which every call makes anew: see gemm/cuda/walk.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "blocksparse/status.h"
#include "gemm/cuda/call.h"
#include "gemm/cuda/wgmma/plan.h"
#include "gemm/cuda/wgrad_wgmma/plan.h"

namespace blocksparse::gemm::wgrad_wgmma {

struct alignas(16) Job {
  int32_t strip;
  int32_t first_patch, patches;
  int32_t reserved;
};

// Thread blocks take jobs in turn, the longest first, and back and forth: a thread block with a long job in one wave
// has a short one in the next.
__host__ __device__ constexpr int job_in_turn(int wave, int thread_block, int grid) {
  return wave * grid + (wave % 2 == 0 ? thread_block : grid - 1 - thread_block);
}

// Where a thread block begins in the jobs that several share.
struct Share {
  int32_t job, step;
};

struct Tables {
  int32_t* chunks;  // which 32 or 64 inputs, for each patch
  int32_t* ids;     // [patches][rows of blocks][columns of blocks]; -1: there is no block
  int2* counts;     // [strips] first patch, patches
  Job* jobs;        // those of most patches first
  Share* shares;    // [grid + 1]; before them {jobs, jobs that are not shared}
  float* parts;     // [2 grid][warpgroups][sums of a thread][128 threads]
  float* gate_parts;

  __device__ int2 job_counts() const { return {shares[0].job, shares[0].step}; }
  __device__ Share share(int i) const { return shares[1 + i]; }
};

inline Tables tables_in(const CudaProblem& p, const Form& form, void* workspace) {
  auto* base = static_cast<char*>(workspace);
  const WorkspacePlaces at = workspace_places(p, form);
  return {.chunks = reinterpret_cast<int32_t*>(base + at.chunks),
          .ids = reinterpret_cast<int32_t*>(base + at.ids),
          .counts = reinterpret_cast<int2*>(base + at.counts),
          .jobs = reinterpret_cast<Job*>(base + at.jobs),
          .shares = reinterpret_cast<Share*>(base + at.shares),
          .parts = reinterpret_cast<float*>(base + at.parts),
          .gate_parts = reinterpret_cast<float*>(base + at.gate_parts)};
}

// `steps` are those of tokens, which each job has.
Status make_jobs(const CudaCall& call, const Form& form, const DeviceWalk& walk, const Tables& to, int32_t grid,
                 int32_t steps);
Status prepare_jobs();

}  // namespace blocksparse::gemm::wgrad_wgmma
