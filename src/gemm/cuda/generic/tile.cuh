// The linear op on any CUDA card, for any problem.
//   fprop, dgrad   y [n, outputs] = f(x [n, inputs] W^T + bias + residual)
//   wgrad          dW[i] = gate_i * dy_out^T x_in, gate gradient <dy_out^T x_in, W[i]>
// Who does what
//   grid      product: a thread block for a tile of 64 tokens x (up to 64) outputs of one piece
//             gradient: a thread block for 64 inputs x (up to 64) outputs of dW, that is 64 / b neighbouring blocks
//   load      all threads copy tiles of 128 bytes of depth, two ahead; elements outside the matrix become 0
//   compute   4 warps of 16 rows: mma.sync for bf16 and f16, fused multiply-add for f32 and f64
//   finish    sums go through shared memory, so that results are stored in the order of memory
// The depth of a product is the list of blocks laid end to end, b inputs each. The depth of a gradient is the tokens.
#pragma once

#include "cuda/launch.h"
#include "cuda/multiply.h"
#include "gemm/cuda/finish.cuh"
#include "gemm/cuda/generic/plan.h"

namespace blocksparse::gemm::generic {
namespace {

using cuda::Even;
using cuda::kDepth;
using cuda::kThreads;
using cuda::kTileRows;
using cuda::Place;

// Config: the element type and the outputs of a tile.
template <class T, int N>
struct Kernel {
  using Element = T;
  using Sum = SumOf<T>;
  static constexpr int outputs = N;
  static constexpr int stages = 3;  // 4 stages take 1.17x the time (b = 32, n = 4096): fewer thread blocks fit an SM
  static constexpr int left_elements = cuda::TileShape<T, kTileRows>::elements;
  static constexpr int right_elements = cuda::TileShape<T, N>::elements;
  static constexpr int gates_elements = kDepth<T> / 8;
  static constexpr int stage_bytes =
      (left_elements + right_elements) * static_cast<int>(sizeof(T)) + 64;  // and gates, up to 64 bytes
  static constexpr int pitch = N + 1;                                       // pitch of the sums in shared memory
  static constexpr int shared_bytes = stages * stage_bytes;
  static_assert(gates_elements * sizeof(Sum) <= 64);
  static_assert(kTileRows * pitch * static_cast<int>(sizeof(Sum)) <= shared_bytes, "sums take the place of the stages");
};

template <class K>
struct Stage {
  typename K::Element *left, *right;
  typename K::Sum* gates;

  __device__ Stage(void* shared, int stage) {
    char* begin = static_cast<char*>(shared) + stage * K::stage_bytes;
    left = reinterpret_cast<typename K::Element*>(begin);
    right = left + K::left_elements;
    gates = reinterpret_cast<typename K::Sum*>(right + K::right_elements);
  }
};

// Elements left along one side of a tile, limited so that 32 bits suffice.
__device__ inline int inside_tile(int64_t left) { return static_cast<int>(min(max(left, int64_t{0}), int64_t{256})); }

__device__ inline bool warp_has_rows(int64_t rows) { return static_cast<int>(threadIdx.x) / 32 * 16 < rows; }

// ---- Launch ---------------------------------------------------------------------------------------------------------

inline int32_t shift_of(int32_t block) { return __builtin_ctz(static_cast<unsigned>(block)); }

// Calls body.template operator()<N>(), with N outputs of a tile for blocks of this size.
template <class Body>
Status with_outputs(int32_t block, Body body) {
  switch (block) {
    case 8: return body.template operator()<8>();
    case 16: return body.template operator()<16>();
    case 32: return body.template operator()<32>();
    default: return body.template operator()<64>();
  }
}

}  // namespace
}  // namespace blocksparse::gemm::generic
