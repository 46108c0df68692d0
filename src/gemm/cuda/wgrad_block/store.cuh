// How the kernels of `wgrad_block` end. Sums go through shared memory, so that lanes write neighbouring 16 bytes of dW.
#pragma once

#include "cuda/ptx/shared.h"
#include "cuda/ptx/stmatrix.h"
#include "gemm/cuda/wgrad_block/load.cuh"

namespace blocksparse::gemm::wgrad_block {
namespace {

// The sums of a lane, 64 rows of a block after the other. wgmma gives it of each 16 x 8 those of rows lane / 4 (+ 8)
// and columns 2 (lane % 4) (+ 1).
template <class S>
using Sums = float[S::kProducts][S::block / 2];

// Room for 64 rows of f32 sums. A warp has 16 of them to itself.
template <class S>
constexpr int kWidePitch = S::block * 4 + 32;  // bytes: no two rows of four begin in one bank
template <class S>
constexpr int kStoreBytes = 64 * kWidePitch<S>;

// Stores a whole block of dW that has the operands' type. The code is short because a thread block runs it once and
// waits for every line of instructions.
template <class S>
__device__ inline void store_narrow(const Common& g, const Place<S>& place, const Sums<S>& sums, uint32_t staged) {
  using T = typename S::Element;
  constexpr int kPitch = S::block * 2, kChunks = S::block / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t own = staged + static_cast<uint32_t>(warp * 16 * kPitch);
  const auto at = [&](int row, int chunk) {
    return own + static_cast<uint32_t>(row * kPitch + (chunk ^ row % 8) * 16);
  };
#pragma unroll
  for (int i = 0; i < S::kProducts; ++i) {
    if (i / S::kHalves >= place.count) return;
#pragma unroll
    for (int c = 0; c < S::block / 16; ++c) {
      const float* of = sums[i] + 8 * c;
      const uint32_t words[4] = {narrow_pair(of[0], of[1], T{}), narrow_pair(of[2], of[3], T{}),
                                 narrow_pair(of[4], of[5], T{}), narrow_pair(of[6], of[7], T{})};
      ptx::stmatrix_x4(at(lane % 16, 2 * c + lane / 16), words);
    }
    __syncwarp();
    // Products of a block lie behind one another in dW, as blocks do.
    const int64_t row = (int64_t{place.first} * S::kHalves + i) * 64 + warp * 16;
    auto* rows = reinterpret_cast<int4*>(static_cast<T*>(g.target.dw) + row * S::block);
#pragma unroll
    for (int c = lane; c < 16 * kChunks; c += 32) rows[c] = ptx::ld_shared_16(at(c / kChunks, c % kChunks));
    __syncwarp();
  }
}

// Stores any dW: of f32, added to what was there, with gates, at the edge of the matrix, or at any address.
template <class S>
__device__ inline void store_wide(const Common& g, const Place<S>& place, const Sums<S>& sums, uint32_t staged) {
  constexpr int kPitch = kWidePitch<S>, kChunks = S::block / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t own = staged + static_cast<uint32_t>(warp * 16 * kPitch);
#pragma unroll
  for (int i = 0; i < S::kProducts; ++i) {
    const int block = i / S::kHalves, half = i % S::kHalves, id = place.first + block;
    if (block >= place.count) return;
    const uint32_t to = own + static_cast<uint32_t>(lane / 4 * kPitch + lane % 4 * 8);
#pragma unroll
    for (int k = 0; k < S::block / 2; k += 2) {
      ptx::st_shared_8(to + static_cast<uint32_t>(k / 2 % 2 * 8 * kPitch + k / 4 * 32), {sums[i][k], sums[i][k + 1]});
    }
    __syncwarp();
#pragma unroll 1
    for (int c = lane; c < 16 * kChunks; c += 32) {
      float values[8];
      const uint32_t from = own + static_cast<uint32_t>(c / kChunks * kPitch + c % kChunks * 32);
#pragma unroll
      for (int k = 0; k < 8; k += 4) {
        const int4 four = ptx::ld_shared_16(from + static_cast<uint32_t>(4 * k));
        values[k] = __int_as_float(four.x), values[k + 1] = __int_as_float(four.y);
        values[k + 2] = __int_as_float(four.z), values[k + 3] = __int_as_float(four.w);
      }
      const int row = half * 64 + warp * 16 + c / kChunks, column = c % kChunks * 8;
      const int64_t left = g.inputs - int64_t{place.column[block]} * S::block - column;
      const bool there = int64_t{place.row[block]} * S::block + row < g.outputs;
      const int inside = there ? static_cast<int>(min(max(left, int64_t{0}), int64_t{8})) : 0;
      const int64_t at = (int64_t{id} * S::block + row) * S::block + column;
      g.target.template store_any_eight<typename S::Element>(id, at, inside, values);
    }
    __syncwarp();
  }
}

// All threads call it. `staged` is room of kStoreBytes that nothing else uses any more.
template <class S>
__device__ inline void store(const Common& g, const Place<S>& place, const Sums<S>& sums, uint32_t staged) {
  bool whole = true;
#pragma unroll
  for (int i = 0; i < S::kBlocks; ++i) {
    whole &=
        (place.row[i] + 1) * int64_t{S::block} <= g.outputs && (place.column[i] + 1) * int64_t{S::block} <= g.inputs;
  }
  const GradientTarget& to = g.target;
  if (whole && !to.dw_is_wide && !to.accumulate && to.gates == nullptr && to.is_aligned()) {
    store_narrow(g, place, sums, staged);
  } else {
    store_wide(g, place, sums, staged);
  }
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_block
