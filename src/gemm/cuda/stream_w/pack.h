// Copies x into the order in which the kernel `stream_w` reads it. Elements outside x become 0.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "blocksparse/status.h"

namespace blocksparse::gemm::stream_w {

struct Pack {
  int64_t size;  // bytes of an element: 2 or 4
  const void* x;
  int64_t token_stride, feature_stride;
  bool vectors;  // 16 bytes at a time may be read: features-last, rows at multiples of 16 bytes
  int32_t n;
  int64_t features;
  int32_t block;
  int64_t blocks;  // blocks of inputs
  int32_t tokens;  // tokens of a slice: n rounded up to what the kernel takes, 8, 16, 32 or 64
  int32_t slices;
  // The destination, slice after slice:
  //   b = 8    [in block][tokens / 32][lane][4 tokens][2 inputs], a lane's fragment in mma's order
  //   b = 16   [in block][tokens / 16][lane][2 tokens][4 inputs], a lane's fragment in mma's order
  //   b >= 32  [inputs / 32][tokens][32 inputs]
  //   f32      [inputs / 16][tokens][16 inputs]; b = 8: [inputs / 8][tokens][8 inputs]
  // With fewer tokens than in the third dimension, fewer lie side by side.
  void* to;
};

Status pack_x(const Pack& p, bool overlap, cudaStream_t stream);

// Prepares the kernels on the current device. kernels_overlap() then says whether the kernels of this file and of
// `stream_w` wait for one another.
Status prepare_pack();
bool kernels_overlap(int32_t device);

}  // namespace blocksparse::gemm::stream_w
