// The list of blocks that the linear op's kernel for many tokens walks for a convolution: each block once for every
// tap of a phase, in the columns of that tap. Made anew by every call, as that kernel's own tables are.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/conv/cuda_phases.h"
#include "ops/linear/cuda.h"

namespace blocksparse::conv {

struct TapWalk {
  linear::DeviceWalk walk;
  const float* gates;  // of each block and tap; null: 1
};

struct TapList {
  linear::DeviceWalk from;  // of blocks
  int64_t rows, blocks;
  TapSubset taps;          // that are listed
  int32_t kernel[3];       // of how many in all
  int32_t columns_of_tap;  // in blocks
  const float* gates;      // of blocks, or null
};

// Into the workspace, at tap_places().
Result<TapWalk> list_taps(const TapList& list, void* workspace, cudaStream_t stream);
Status prepare_taps();

}  // namespace blocksparse::conv
