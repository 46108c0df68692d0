// The jobs of the kernel `wgrad_in_registers` and the blocks that each holds. Every call makes them anew.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "blocksparse/status.h"
#include "gemm/cuda/call.h"
#include "gemm/cuda/wgrad_in_registers/plan.h"

namespace blocksparse::gemm::wgrad_in_registers {

struct alignas(16) Job {
  int32_t first_column, columns;  // of blocks
  int32_t first_entry, entries;
};

// A block of a job, row after row, columns rising. At b = 8 a row with an odd number of blocks ends with an entry of
// weight -1, which is no block.
struct Entry {
  int32_t weight;
  uint16_t row, column;  // within strip and job
};

struct Tables {
  Entry* entries;
  Job* jobs;        // [strips][kMostStripJobs]
  int32_t* counts;  // [strips] jobs in use
  float* partial;   // [slices][blocks, b, b]
};

inline Tables tables_in(const CudaProblem& p, void* workspace) {
  auto* base = static_cast<char*>(workspace);
  const WorkspacePlaces at = workspace_places(p);
  return {.entries = reinterpret_cast<Entry*>(base + at.entries),
          .jobs = reinterpret_cast<Job*>(base + at.jobs),
          .counts = reinterpret_cast<int32_t*>(base + at.counts),
          .partial = reinterpret_cast<float*>(base + at.partial)};
}

Status make_jobs(const CudaCall& call, const Plan& plan, const DeviceWalk& walk, const Tables& to);
Status prepare_jobs();

}  // namespace blocksparse::gemm::wgrad_in_registers
