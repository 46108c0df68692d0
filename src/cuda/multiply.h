// Products of two tiles by a thread block of 4 warps, each of which owns 16 of the 64 rows:
//   sum [64, N] += left [64, depth] right [N, depth]^T
// Tensor cores (mma.sync) multiply 16-bit elements, fused multiply-adds f32 and f64. `gates` is null or a factor for
// every 8 of the depth; products with a factor of 0 are left out.
#pragma once

#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile.h"

namespace blocksparse::cuda {

// The sums of a thread block, spread over the registers of its threads.
template <class T, int N>
class TensorSums {
 public:
  __device__ void add(const Tile<T>& left, const Tile<T>& right, const float* gates) {
#pragma unroll
    for (int k = 0; k < kDepth<T>; k += 16) {
      uint32_t a[4], b[N / 8][2];
      load_left(a, left, k);
      load_right(b, right, k);
      if (gates == nullptr) {
#pragma unroll
        for (int j = 0; j < N / 8; ++j) ptx::mma_m16n8k16(sum_[j], a, b[j], T{});
      } else {
        add_gated(a[0], a[1], b, 0, gates[k / 8]);
        add_gated(a[2], a[3], b, 1, gates[k / 8 + 1]);
      }
    }
  }

  // Calls body(row, column, sum) for the sums of this thread.
  template <class Body>
  __device__ void for_each(Body body) const {
    const int row = warp() * 16 + lane() / 4, column = lane() % 4 * 2;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) body(row + i / 2 * 8, column + j * 8 + i % 2, sum_[j][i]);
    }
  }

 private:
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // The address that this lane gives to ldmatrix: its row of the 8 x 8 matrix at (across, depth).
  __device__ static const T* row_of(const Tile<T>& tile, int across, int depth) {
    return tile.depth_contiguous ? tile.at(across + lane() % 8, depth) : tile.at(across, depth + lane() % 8);
  }

  __device__ static void load_left(uint32_t (&a)[4], const Tile<T>& left, int k) {
    const int matrix = lane() / 8;  // the halves of the rows alternate first
    const T* row = row_of(left, warp() * 16 + matrix % 2 * 8, k + matrix / 2 * 8);
    if (left.depth_contiguous) ptx::ldmatrix_x4(a, row);
    else ptx::ldmatrix_x4_trans(a, row);
  }

  __device__ static void load_right(uint32_t (&b)[N / 8][2], const Tile<T>& right, int k) {
    const int matrix = lane() / 8;  // the halves of the depth alternate first
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
      // With 8 columns the second pair of matrices repeats the first.
      const T* row = row_of(right, j * 8 + (N > 8 ? matrix / 2 * 8 : 0), k + matrix % 2 * 8);
      uint32_t both[4];
      if (right.depth_contiguous) ptx::ldmatrix_x4(both, row);
      else ptx::ldmatrix_x4_trans(both, row);
      b[j][0] = both[0];
      b[j][1] = both[1];
      if constexpr (N > 8) {
        b[j + 1][0] = both[2];
        b[j + 1][1] = both[3];
      }
    }
  }

  // Scales the sums of the products of one block of W. Scaling elements instead would round them.
  __device__ void add_gated(uint32_t a0, uint32_t a1, const uint32_t (&b)[N / 8][2], int half, float gate) {
    if (gate == 0) return;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      float products[4] = {};
      ptx::mma_m16n8k8(products, a0, a1, b[j][half], T{});
#pragma unroll
      for (int i = 0; i < 4; ++i) sum_[j][i] += gate * products[i];
    }
  }

  float sum_[N / 8][4] = {};
};

template <class T, int N>
class ScalarSums {
 public:
  __device__ void add(const Tile<T>& left, const Tile<T>& right, const T* gates) {
    if (left.depth_contiguous) {
      if (right.depth_contiguous) add_ordered<true, true>(left, right, gates);
      else add_ordered<true, false>(left, right, gates);
    } else {
      if (right.depth_contiguous) add_ordered<false, true>(left, right, gates);
      else add_ordered<false, false>(left, right, gates);
    }
  }

  template <class Body>
  __device__ void for_each(Body body) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < N / 8; ++j) body(row() + 4 * i, column() + 8 * j, sum_[i][j]);
    }
  }

 private:
  // Lanes are 4 rows x 8 columns. A thread's rows lie 4 apart and its columns 8, which avoids bank conflicts.
  __device__ static int row() {
    return static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 8;
  }
  __device__ static int column() { return static_cast<int>(threadIdx.x) % 8; }

  // The orders are template parameters: addresses then differ by constants.
  template <bool LeftDepth, bool RightDepth>
  __device__ void add_ordered(const Tile<T>& left, const Tile<T>& right, const T* gates) {
    constexpr int kLeftAcross = LeftDepth ? pitch_of<T>(kDepth<T>) : 1;
    constexpr int kLeftDepth = LeftDepth ? 1 : pitch_of<T>(kTileRows);
    constexpr int kRightAcross = RightDepth ? pitch_of<T>(kDepth<T>) : 1;
    constexpr int kRightDepth = RightDepth ? 1 : pitch_of<T>(N);
    const T* l = left.data + row() * kLeftAcross;
    const T* r = right.data + column() * kRightAcross;
#pragma unroll 1
    for (int k = 0; k < kDepth<T>; k += 8, l += 8 * kLeftDepth, r += 8 * kRightDepth) {
      const T gate = gates == nullptr ? T(1) : gates[k / 8];
      if (gate == 0) continue;
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        T a[4], b[N / 8];
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = gate * l[4 * i * kLeftAcross + step * kLeftDepth];
#pragma unroll
        for (int j = 0; j < N / 8; ++j) b[j] = r[8 * j * kRightAcross + step * kRightDepth];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < N / 8; ++j) sum_[i][j] += a[i] * b[j];
        }
      }
    }
  }

  T sum_[4][N / 8] = {};
};

template <class T, int N>
using Sums = std::conditional_t<sizeof(T) == 2, TensorSums<T, N>, ScalarSums<T, N>>;

}  // namespace blocksparse::cuda
