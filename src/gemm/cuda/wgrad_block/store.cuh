// How the kernel `wgrad_block` ends: sums become blocks of dW, and gradients of gates.
#pragma once

#include "cuda/ptx/warpgroup.h"
#include "cuda/turn_quad.h"
#include "gemm/cuda/wgrad_block/feed.cuh"

namespace blocksparse::gemm::wgrad_block {
namespace {

// What becomes of the sums of a thread block. wgmma gives a lane of each 16 x 8 of dW those of rows lane / 4 (+ 8) and
// columns 2 (lane % 4) (+ 1).
template <class K>
class Storer {
  using T = typename K::Element;
  static constexpr int kOwn = 16;                         // sums of 16 rows x 32 columns of a warp
  static constexpr int kGroups = K::block == 32 ? 2 : 4;  // of them, of a lane
  static constexpr int kGroupsOfBlock = K::block / 32;

 public:
  using Flat = float[kGroups * kOwn];

  __device__ Storer(const typename K::KernelArgs& g, const Job<K>& job) : g_(g), job_(job) {}

  // A loop whose sums move up, since registers have no index: straight code is long, and fetched as it runs.
  __device__ void store(Flat& sums) {
    __shared__ float of_warp[4][K::kBlocks];
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
    float product = 0;
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      place(group);
      product += store_group(sums);
#pragma unroll
      for (int i = 0; i + kOwn < kGroups * kOwn; ++i) sums[i] = sums[i + kOwn];
      if (g_.dgates != nullptr && (group + 1) % kGroupsOfBlock == 0) {
        product = sum_of_warp(product);
        if (thread % 32 == 0) of_warp[warp][group_of_block(group)] = product;
        product = 0;
      }
    }
    if (g_.dgates == nullptr) return;
    ptx::bar_sync(1, 128);
    if (thread >= K::kBlocks) return;
    const int at = static_cast<int>(blockIdx.x) * K::kBlocks + thread;
    if (at >= g_.blocks) return;
    const int id = K::block == 32 ? g_.by_in.refs[at].weight : at, first = K::block == 32 ? thread % 2 * 2 : 0;
    float sum = of_warp[first][thread] + of_warp[first + 1][thread];
    if (K::block != 32) sum += of_warp[2][thread] + of_warp[3][thread];
    g_.dgates[id] = (g_.target.accumulate ? g_.dgates[id] : 0) + sum;
  }

 private:
  __device__ static bool lower() { return K::block == 32 && threadIdx.x >= 64; }
  // Which of the thread block's, for this warp.
  __device__ static int group_of_block(int group) {
    return K::block == 32 ? group * 2 + lower() : group / kGroupsOfBlock;
  }

  __device__ void place(int group) {
    const int of = group_of_block(group), thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int r = 0; r < K::kBlocks; ++r) {
      if (r == of) id_ = job_.id[r], row_ = job_.row[r], column_ = job_.column[r];
    }
    in_row_ = thread / 32 * 16 % min(K::block, 64) + thread % 32 / 4;
    if (K::block == 128) in_row_ += static_cast<int>(blockIdx.x) % 2 * 64;
    in_column_ = group % kGroupsOfBlock * 32 + thread % 4 * 8;
  }

  // 8 columns of a row a lane and a time; what they add to <S, W>.
  __device__ float store_group(const Flat& sums) const {
    float product = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float values[8];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = sums[4 * j + 2 * half + i];
        cuda::turn_quad(words);
#pragma unroll
        for (int j = 0; j < 4; ++j) values[2 * j + i] = words[j];
      }
      if (id_ < 0) continue;
      const int r = in_row_ + 8 * half;
      const int64_t output = int64_t{row_} * K::block + r, input = int64_t{column_} * K::block + in_column_;
      const int inside =
          output < g_.outputs ? static_cast<int>(min(max(g_.inputs - input, int64_t{0}), int64_t{8})) : 0;
      const int64_t at = (int64_t{id_} * K::block + r) * K::block + in_column_;
      if (g_.dgates != nullptr) product += gate_product_of_eight<T>(g_.w, at, inside, values);
      put(at, inside, values);
    }
    return product;
  }

  __device__ void put(int64_t at, int inside, float (&values)[8]) const {
    if (g_.target.is_aligned() && (inside == 8 || !g_.target.accumulate)) {  // else edges of dW would not be left alone
      g_.target.template store_eight<T>(id_, at, inside, values);
      return;
    }
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      g_.target.template store_pair<T>(id_, at + k, min(max(inside - k, 0), 2), {values[k], values[k + 1]});
    }
  }

  const typename K::KernelArgs& g_;
  const Job<K>& job_;
  int id_ = -1, row_ = 0, column_ = 0, in_row_ = 0, in_column_ = 0;
};

}  // namespace
}  // namespace blocksparse::gemm::wgrad_block
