// The products of the kernel `wgrad_in_registers`, and how it stores its sums.
#pragma once

#include "core/ceil_div.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "gemm/cuda/wgrad_in_registers/patches.cuh"

namespace blocksparse::gemm::wgrad_in_registers {
namespace {

// Fragments of a patch for 32 tokens: [16 tokens][16 outputs or inputs][mma's words]. At b = 8 one part holds 32 tokens
// of dy.
template <class K>
struct Fragments {
  static constexpr int kTimes = 2, kParts = K::patch == 8 ? 1 : K::patch / 16;
  static_assert(kTimes * 16 == kTokens);
  uint32_t words[kTimes][kParts][4];

  __device__ void load_x(uint32_t at) {
    each([&](int t, int k) { ptx::ldmatrix_x4_trans_at(words[t][k], (at ^ (32 * k)) + t * 16 * 128); });
  }
  __device__ void load_dy_if(uint32_t at, uint32_t wanted) {
    if constexpr (K::patch == 8) ptx::ldmatrix_x4_trans_if(words[0][0], at, wanted);
    else each([&](int t, int k) { ptx::ldmatrix_x4_trans_if(words[t][k], (at ^ (32 * k)) + t * 16 * 128, wanted); });
  }

 private:
  template <class Body>
  __device__ static void each(Body body) {
#pragma unroll
    for (int t = 0; t < kTimes; ++t) {
#pragma unroll
      for (int k = 0; k < kParts; ++k) body(t, k);
    }
  }
};

// sum += dy^T x of 16 tokens; at b = 8 the sum is transposed.
template <class K>
__device__ inline void multiply_patch(float (&sum)[K::sums], const Fragments<K>& x, const Fragments<K>& dy, int t) {
  using T = typename K::T;
  if constexpr (K::patch == 8) {
    const uint32_t b[2] = {dy.words[0][0][2 * t], dy.words[0][0][2 * t + 1]};
    ptx::mma_m16n8k16(sum, x.words[t][0], b, T{});
  } else {
#pragma unroll
    for (int i = 0; i < K::sums / 4; ++i) {
      const int m = i / (2 * x.kParts), k = i % (2 * x.kParts);
      const uint32_t* from = x.words[t][k / 2] + k % 2 * 2;
      const uint32_t b[2] = {from[0], from[1]};
      ptx::mma_m16n8k16(reinterpret_cast<float(&)[4]>(sum[4 * i]), dy.words[t][m], b, T{});
    }
  }
}

// Tokens are rows in shared memory and the depth of the product, so every fragment is transposed as it is loaded. A
// patch's addresses serve two times 16 tokens: computed for each time, instructions were the bound.
template <class K>
__device__ inline void multiply_patches(const Args& g, const Patches<K>& patches, uint32_t stage,
                                        float (&sum)[K::patches][K::sums]) {
  const uint32_t lane = threadIdx.x % 32, left = lane % 8 + lane / 16 * 8, right = lane % 16;  // tokens
  const uint32_t x_stage = stage + static_cast<uint32_t>(g.dy_boxes * kBoxBytes);
  const uint32_t x_lane = x_stage + (K::patch == 8 ? left : right) * 128;
  const uint32_t dy_lane = stage + (K::patch == 8 ? lane : left) * 128;
  Fragments<K> x[K::ahead + 1], dy = {};
#pragma unroll
  for (int j = 0; j < K::ahead; ++j) x[j].load_x(x_lane + patches.x_offset(j));
#pragma unroll
  for (int j = 0; j < K::patches; ++j) {
    if (j % K::together == 0 && j >= patches.count) return;
    dy.load_dy_if(dy_lane + patches.dy_offset(j), patches.is_new_row(j));
    const Fragments<K>& of_x = x[j % (K::ahead + 1)];
    multiply_patch<K>(sum[j], of_x, dy, 0);  // the next product waits for this one
    if (j + K::ahead < K::patches) x[(j + K::ahead) % (K::ahead + 1)].load_x(x_lane + patches.x_offset(j + K::ahead));
    multiply_patch<K>(sum[j], of_x, dy, 1);
  }
}

// ---- Finish ---------------------------------------------------------------------------------------------------------

template <class T>
__device__ inline void store_pair(const Args& g, const Item& item, Entry e, int row, int column, float2 sum) {
  const int64_t output = ((int64_t{item.strip} * g.strip_rows + e.row) << g.block_shift) + row;
  const int64_t input = ((int64_t{item.job.first_column} + e.column) << g.block_shift) + column;
  const int64_t at = (((int64_t{e.weight} << g.block_shift) + row) << g.block_shift) + column;
  if (g.partial != nullptr) {
    *reinterpret_cast<float2*>(g.partial + item.slice * g.values + at) = sum;
    return;
  }
  const int inside = static_cast<int>(min(max(g.inputs - input, int64_t{0}), int64_t{2}));
  g.target.store_pair<T>(e.weight, at, output < g.outputs ? inside : 0, sum);
}

// A lane has two sums of an 8 x 8 matrix: row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1. Returns the sums at those
// places of the transposed matrix.
__device__ inline float2 transposed(float first, float second) {
  const int lane = static_cast<int>(threadIdx.x) % 32, from = lane % 4 * 8 + lane / 8;
  const bool odd = lane / 4 % 2 != 0;
  const float a = __shfl_sync(~0u, first, from), b = __shfl_sync(~0u, second, from);
  const float c = __shfl_sync(~0u, first, from + 4), d = __shfl_sync(~0u, second, from + 4);
  return {odd ? b : a, odd ? d : c};
}

// The entries of a warp's patches, one or two a lane. Entries that are read one by one between the stores would each be
// waited for.
template <class K>
struct EntriesOfLanes {
  static constexpr int kEach = ceil_div(K::patches * (K::patch == 8 ? 2 : 1), 32);
  Entry held[kEach];

  __device__ EntriesOfLanes(const Args& g, const Item& item, const Patches<K>& patches) {
    const Entry* entries = g.tables.entries + item.job.first_entry;
    const int lane = static_cast<int>(threadIdx.x) % 32, count = patches.count * (K::patch == 8 ? 2 : 1);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = lane + 32 * i;
      held[i] = {-1, 0, 0};
      if (at < count) held[i] = entries[K::patch == 8 ? 2 * patches.first + at : entry_of(g, patches.first + at)];
    }
  }
  __device__ Entry at(int i) const {
    const Entry& e = held[i / 32];
    const uint32_t place = __shfl_sync(~0u, e.row | static_cast<uint32_t>(e.column) << 16, i % 32);
    return {__shfl_sync(~0u, e.weight, i % 32), static_cast<uint16_t>(place), static_cast<uint16_t>(place >> 16)};
  }
};

template <class K>
__device__ inline void store_patch(const Args& g, const Item& item, const Patches<K>& patches,
                                   const float (&sum)[K::patches][K::sums]) {
  using T = typename K::T;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const EntriesOfLanes<K> entries(g, item, patches);
#pragma unroll
  for (int j = 0; j < K::patches; ++j) {
    if (j >= patches.count) return;
    if constexpr (K::patch == 8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Entry e = entries.at(2 * j + i);
        const float2 pair = transposed(sum[j][2 * i], sum[j][2 * i + 1]);
        if (e.weight >= 0) store_pair<T>(g, item, e, lane / 4, lane % 4 * 2, pair);
      }
    } else {
      const Entry e = entries.at(j);
      const PatchInBlock at(g, patches.first + j);
      const int row = at.row * K::patch + lane / 4, column = at.column * K::patch + lane % 4 * 2;
      constexpr int kColumns = K::patch / 8;
#pragma unroll
      for (int k = 0; k < K::sums / 2; ++k) {  // the next pair is 8 rows down, then 8 columns on, then 16 rows down
        const int rows = k % 2 * 8 + k / (2 * kColumns) * 16, columns = k / 2 % kColumns * 8;
        store_pair<T>(g, item, e, row + rows, column + columns, {sum[j][2 * k], sum[j][2 * k + 1]});
      }
    }
  }
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_in_registers
