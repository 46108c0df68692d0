// How the kernels of `wgrad_block` end: sums go through shared memory, for dW is written by 16 bytes beside each other.
#pragma once

#include "cuda/ptx/shared.h"
#include "cuda/ptx/stmatrix.h"
#include "gemm/cuda/wgrad_block/load.cuh"

namespace blocksparse::gemm::wgrad_block {
namespace {

// Of a lane, of each 64 rows of the block: wgmma gives it of each 16 x 8 those of rows lane / 4 (+ 8) and columns
// 2 (lane % 4) (+ 1).
template <class S>
using Sums = float[S::kHalves][S::block / 2];

// A warp's 16 rows of one of the halves, before they are stored.
template <class S>
constexpr int kWidePitch = S::block * 4 + 32;  // bytes: no two rows of four begin in one bank
template <class S>
constexpr int kStoreBytes = 64 * kWidePitch<S>;

// Eight columns of a row.
template <class S>
__device__ inline void put(const Common& g, int32_t id, int64_t at, int inside, float (&values)[8]) {
  using T = typename S::Element;
  if (g.target.is_aligned() && (inside == 8 || !g.target.accumulate)) {  // else edges of dW would not be left alone
    g.target.template store_eight<T>(id, at, inside, values);
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    g.target.template store_pair<T>(id, at + k, min(max(inside - k, 0), 2), {values[k], values[k + 1]});
  }
}

// dW of its operands' type, in a whole block. Its code is short: 128 threads run it once, and wait for every line of
// it.
template <class S>
__device__ inline void store_narrow(const Common& g, const Place<S>& place, const Sums<S>& sums, uint32_t staged) {
  using T = typename S::Element;
  constexpr int kPitch = S::block * 2, kChunks = S::block / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t own = staged + static_cast<uint32_t>(warp * 16 * kPitch);
  const auto at = [&](int row, int chunk) {
    return own + static_cast<uint32_t>(row * kPitch + (chunk ^ row % 8) * 16);
  };
  auto* dw = static_cast<T*>(g.target.dw) + int64_t{place.id} * S::block * S::block;
#pragma unroll
  for (int half = 0; half < S::kHalves; ++half) {
#pragma unroll
    for (int c = 0; c < S::block / 16; ++c) {
      const float* of = sums[half] + 8 * c;
      const uint32_t words[4] = {narrow_pair(of[0], of[1], T{}), narrow_pair(of[2], of[3], T{}),
                                 narrow_pair(of[4], of[5], T{}), narrow_pair(of[6], of[7], T{})};
      ptx::stmatrix_x4(at(lane % 16, 2 * c + lane / 16), words);
    }
    __syncwarp();
    auto* rows = reinterpret_cast<int4*>(dw + (half * 64 + warp * 16) * S::block);
#pragma unroll
    for (int i = lane; i < 16 * kChunks; i += 32) rows[i] = ptx::ld_shared_16(at(i / kChunks, i % kChunks));
    __syncwarp();
  }
}

// Whatever else dW may be.
template <class S>
__device__ inline void store_wide(const Common& g, const Place<S>& place, const Sums<S>& sums, uint32_t staged) {
  constexpr int kPitch = kWidePitch<S>, kChunks = S::block / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t own = staged + static_cast<uint32_t>(warp * 16 * kPitch);
#pragma unroll
  for (int half = 0; half < S::kHalves; ++half) {
    const uint32_t to = own + static_cast<uint32_t>(lane / 4 * kPitch + lane % 4 * 8);
#pragma unroll
    for (int i = 0; i < S::block / 2; i += 2) {
      ptx::st_shared_8(to + static_cast<uint32_t>(i / 2 % 2 * 8 * kPitch + i / 4 * 32),
                       {sums[half][i], sums[half][i + 1]});
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < 16 * kChunks; i += 32) {
      float values[8];
      const uint32_t from = own + static_cast<uint32_t>(i / kChunks * kPitch + i % kChunks * 32);
#pragma unroll
      for (int k = 0; k < 8; k += 4) {
        const int4 four = ptx::ld_shared_16(from + static_cast<uint32_t>(4 * k));
        values[k] = __int_as_float(four.x), values[k + 1] = __int_as_float(four.y);
        values[k + 2] = __int_as_float(four.z), values[k + 3] = __int_as_float(four.w);
      }
      const int row = half * 64 + warp * 16 + i / kChunks, column = i % kChunks * 8;
      const int64_t left = g.inputs - place.input() - column;
      const int inside =
          place.output() + row < g.outputs ? static_cast<int>(min(max(left, int64_t{0}), int64_t{8})) : 0;
      put<S>(g, place.id, (int64_t{place.id} * S::block + row) * S::block + column, inside, values);
    }
    __syncwarp();
  }
}

// All threads. `staged` is free: kStoreBytes that nothing is read from any more.
template <class S>
__device__ inline void store(const Common& g, const Place<S>& place, const Sums<S>& sums, uint32_t staged) {
  const bool whole = place.output() + S::block <= g.outputs && place.input() + S::block <= g.inputs;
  const GradientTarget& to = g.target;
  if (whole && !to.dw_is_wide && !to.accumulate && to.gates == nullptr && to.is_aligned()) {
    store_narrow(g, place, sums, staged);
  } else {
    store_wide(g, place, sums, staged);
  }
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_block
