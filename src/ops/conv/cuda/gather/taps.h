// The list of blocks that the family wgmma walks for a convolution: every block once for each tap of a phase, in the
// columns of that tap. Every call makes it anew, as it does the family's own tables.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/cuda/call.h"
#include "ops/conv/cuda/gather/phases.h"
#include "ops/conv/cuda/select.h"

namespace blocksparse::conv {

struct TapWalk {
  gemm::DeviceWalk walk;
  const float* gates;  // each block's gate at each tap; null: 1
};

struct TapList {
  gemm::DeviceWalk from;  // of blocks
  int64_t rows, blocks;
  TapSubset taps;          // the listed ones
  int32_t kernel[3];       // sizes of the whole filter
  int32_t columns_of_tap;  // in blocks
  const float* gates;      // of blocks, or null
};

// Lists the taps in the workspace, at tap_places().
Result<TapWalk> list_taps(const TapList& list, void* workspace, cudaStream_t stream);
Status prepare_taps();

inline TapList tap_list(const Phase& phase, const Gather& gather, const LayoutView& layout, bool by_in, int64_t rows,
                        const void* gates) {
  TapList list{.from = gemm::walk_on_device(layout, by_in),
               .rows = rows,
               .blocks = layout.blocks,
               .taps = phase.taps,
               .kernel = {},
               .columns_of_tap = static_cast<int32_t>(phase.x.inputs_of_tap / layout.block_size),
               .gates = static_cast<const float*>(gates)};
  for (size_t a = 0; a < 3; ++a) list.kernel[a] = static_cast<int32_t>(gather.kernel[a]);
  return list;
}

// The workspace behind the list of taps.
inline Workspace after_taps(const Workspace& workspace, int64_t rows, int64_t blocks, int64_t taps) {
  const int64_t bytes = tap_places(rows, blocks, taps).end;
  return {static_cast<char*>(workspace.data) + bytes, workspace.bytes - static_cast<size_t>(bytes)};
}

}  // namespace blocksparse::conv
