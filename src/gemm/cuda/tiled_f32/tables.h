// What the kernels `tiled_f32` walk. A small kernel makes it in the workspace before every call.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/cuda/call.h"
#include "gemm/cuda/tiled_f32/plan.h"

namespace blocksparse::gemm::tiled_f32 {

// fprop and dgrad. A group is the rows of blocks of one tile of outputs. An entry is an input block that at least one
// of these rows has, in order.
struct Walk {
  const int32_t* counts;   // [groups]
  const int32_t* inputs;   // [groups][input blocks]
  const int32_t* weights;  // [groups][input blocks][rows of a group]: 1 + the block, 0 for none
};

// wgrad. Neighbouring blocks of one row of W.
struct Run {
  int32_t row, first, last;
};

Walk walk_in(const CudaProblem& p, void* workspace);
Status make_walk(const Product& p, const CudaCall& call);

// The number of runs, and the runs, of which there are at most most_runs().
const int32_t* run_count(void* workspace);
const Run* run_list(void* workspace);
Status make_runs(const WeightGradient& g, const CudaCall& call);

Status prepare_tables();

}  // namespace blocksparse::gemm::tiled_f32
