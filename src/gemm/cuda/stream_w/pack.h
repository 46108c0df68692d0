// Kernel tokens of x, copied into the order in which the kernel `stream_w` reads them; what is outside of x becomes 0.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "blocksparse/status.h"

namespace blocksparse::gemm::stream_w {

struct Pack {
  int64_t size;  // of an element, bytes: 2 or 4
  const void* x;
  int64_t token_stride, feature_stride;
  bool vectors;  // 16 bytes at a time may be read where they lie: features-last, rows at multiples of 16 bytes
  int32_t n;
  int64_t features;
  int32_t block;
  int64_t blocks;  // of inputs
  int32_t tokens;  // of a slice: n rounded up to what the kernel takes, 8, 16, 32 or 64
  int32_t slices;
  // A lane's fragment of x in mma's order, b = 8: [in block][tokens / 32][lane][4 tokens][2 inputs],
  // b = 16: [in block][tokens / 16][lane][2 tokens][4 inputs]; with less tokens than that, less lie side by side.
  // b >= 32: [inputs / 32][tokens][32 inputs]. f32: [inputs / 16][tokens][16 inputs], of b = 8 with 8 for 16. Slice
  // after slice.
  void* to;
};

Status pack_x(const Pack& p, bool overlap, cudaStream_t stream);

// On the current device; kernels_overlap() then says whether the kernels of this file and of `stream_w` wait for each
// other.
Status prepare_pack();
bool kernels_overlap(int32_t device);

}  // namespace blocksparse::gemm::stream_w
