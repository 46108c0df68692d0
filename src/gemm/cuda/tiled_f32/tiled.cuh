// Products in f32 for many tokens on any card: by fused multiply-add or, if the caller allows it, by tensor cores in
// tf32. This file holds what the kernels of fprop, dgrad and wgrad share.
//
// Tiles lie in shared memory as vectors of 16 bytes, permuted so that neither copies nor reads have bank conflicts. A
// matrix whose rows run along the depth ("rows") and one whose rows lie across it ("columns") are read alike: mma takes
// inputs 4 t to 4 t + 3 of 16 from lane t of 4, for both operands.
#pragma once

#include "cuda/launch.h"
#include "cuda/number.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared.h"
#include "gemm/cuda/finish.cuh"
#include "gemm/cuda/tiled_f32/tables.h"

namespace blocksparse::gemm::tiled_f32 {

// Prepares the kernels that use tensor cores, which are compiled separately.
Status prepare_tf32();
Status launch_product_tf32(const Product& p, const CudaCall& call);
Status launch_gradient_tf32(const WeightGradient& g, const CudaCall& call);

namespace {

constexpr int kThreads = 128;

// The place of vector v, in bytes.
//   rows     [row][Depth]: of each row of 8 (32 deep), 4 or 2 vectors
//   columns  [depth][Width]: rows of 8 (32 wide or more), 4 or 2 vectors
//   step     the place from `row` on, if row is less than the power of 2 that step is a multiple of
template <int Depth>
__device__ inline int place_in_rows(int row, int v, int step = 0) {
  const int swap = (Depth == 32 ? (row & 1) << 2 : 0) ^ (row >> 1 & 3) ^ (step >> 1 & 3);
  return (row + step) * Depth * 4 + ((Depth == 8 ? v : v ^ swap) * 16);
}

template <int Width>
__device__ inline int place_in_columns(int first, int v, int step = 0) {
  const int t = (first >> 2 & 3) ^ (step >> 2 & 3), k = first + step;
  if constexpr (Width >= 32) return k * Width * 4 + ((v ^ (t << 1)) * 16);
  else if constexpr (Width == 16) return ((k & ~15) + 4 * (k & 3) + t) * 64 + ((v ^ (t & 2)) * 16);
  else return ((k & ~15) + 4 * (k & 3) + t) * 32 + v * 16;
}

// The place in columns of 8 x 8 blocks, whose depth of 8 lane t reads as inputs 2 t and 2 t + 1.
__device__ inline int place_in_small_columns(int k, int v) { return (4 * (k & 1) + (k >> 1)) * 32 + v * 16; }

__device__ inline void read_4(float (&to)[4], uint32_t from) {
  const int4 v = ptx::ld_shared_16(from);
  to[0] = __int_as_float(v.x), to[1] = __int_as_float(v.y), to[2] = __int_as_float(v.z), to[3] = __int_as_float(v.w);
}

template <int Count>
__device__ inline void read(float (&to)[Count], uint32_t from) {
  if constexpr (Count == 4) {
    read_4(to, from);
  } else if constexpr (Count == 2) {
    const float2 v = ptx::ld_shared_8(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = ptx::ld_shared_4(from);
  }
}

// Reads the Width / 8 elements that a lane has of input 4 t + c of 16. mma's left operand: element 2 m + half is row g
// or g + 8 of tile m. Its right operand: element j is of tile j.
template <int Width>
__device__ inline void read_column(float (&to)[Width / 8], uint32_t from, int c) {
  const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4, k = 4 * t + c;
  constexpr int kCount = Width / 8;
  read<kCount>(to, from + place_in_columns<Width>(k, g * kCount / 4) + g * kCount % 4 * 4);
}

// Waits until all copies except those of the last Groups commits have arrived and all threads are done with the step
// before.
template <int Groups>
__device__ inline void wait_for_stage() {
  ptx::cp_async_wait<Groups>();
  __syncthreads();
}

}  // namespace
}  // namespace blocksparse::gemm::tiled_f32
