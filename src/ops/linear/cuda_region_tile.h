// The products of the kernel `regions`, and where its sums go.
#pragma once

#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "ops/linear/cuda_region_cells.h"

namespace blocksparse::linear {
namespace {

// Tokens are rows in shared memory and the depth of the product, so all fragments are transposed as they are loaded. A
// cell's addresses serve two times 16 tokens: one time each, instructions were what bound this.
template <class K>
__device__ inline void multiply_region(const RegionGradient& g, const RegionCells<K>& cells, uint32_t stage,
                                       float (&sum)[K::cells][K::sums]) {
  using T = typename K::T;
  constexpr bool kPairs = K::cell == 8;
  constexpr int kParts = kPairs ? 1 : K::cell / 16, kAhead = K::together;  // parts of 16 outputs, of 16 inputs
  constexpr int kTimes = kRegionTokens / 16;
  const uint32_t lane = threadIdx.x % 32, left = lane % 8 + lane / 16 * 8, right = lane % 16;  // tokens
  const uint32_t x = stage + static_cast<uint32_t>(g.dy_boxes * kRegionBoxBytes) + (kPairs ? left : right) * 128;
  const uint32_t dy = stage + (kPairs ? lane : left) * 128;
  uint32_t of_x[2][kAhead][kTimes][kParts][4], of_dy[kTimes][kParts][4] = {};
  const auto load_x = [&](int group) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t at = x + cells.x_offset(group * kAhead + i);
#pragma unroll
      for (int t = 0; t < kTimes; ++t) {
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
          ptx::ldmatrix_x4_trans_at(of_x[group % 2][i][t][k], (at ^ (32 * k)) + t * 16 * 128);
        }
      }
    }
  };
  load_x(0);
#pragma unroll
  for (int group = 0; group < K::cells / kAhead; ++group) {
    if (group * kAhead >= cells.count) return;
    if (group + 1 < K::cells / kAhead && (group + 1) * kAhead < cells.count) load_x(group + 1);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int j = group * kAhead + i;
      const uint32_t is_new = cells.is_new_row(j);
      const uint32_t at = dy + cells.dy_offset(j);
      if constexpr (kPairs) {  // 32 tokens at once
        uint32_t(&b)[4] = of_dy[0][0];
        ptx::ldmatrix_x4_trans_if(b, at, is_new);
#pragma unroll
        for (int t = 0; t < kTimes; ++t) {
          const uint32_t of_time[2] = {b[2 * t], b[2 * t + 1]};
          ptx::mma_m16n8k16(sum[j], of_x[group % 2][i][t][0], of_time, T{});
        }
      } else {
#pragma unroll
        for (int t = 0; t < kTimes; ++t) {
#pragma unroll
          for (int m = 0; m < kParts; ++m) {
            ptx::ldmatrix_x4_trans_if(of_dy[t][m], (at ^ (32 * m)) + t * 16 * 128, is_new);
          }
        }
#pragma unroll
        for (int t = 0; t < kTimes; ++t) {
#pragma unroll
          for (int m = 0; m < kParts; ++m) {
#pragma unroll
            for (int k = 0; k < 2 * kParts; ++k) {
              const uint32_t* from = of_x[group % 2][i][t][k / 2] + k % 2 * 2;
              const uint32_t b[2] = {from[0], from[1]};
              ptx::mma_m16n8k16(reinterpret_cast<float(&)[4]>(sum[j][(m * 2 * kParts + k) * 4]), of_dy[t][m], b, T{});
            }
          }
        }
      }
    }
  }
}

// ---- Finish ---------------------------------------------------------------------------------------------------------

template <class T>
__device__ inline void store_region_pair(const RegionGradient& g, const RegionItem& item, RegionEntry e, int row,
                                         int column, float2 sum) {
  const int64_t output = ((int64_t{item.strip} * g.strip_rows + e.row) << g.block_shift) + row;
  const int64_t input = ((int64_t{item.unit.first_column} + e.column) << g.block_shift) + column;
  const int64_t at = (((int64_t{e.weight} << g.block_shift) + row) << g.block_shift) + column;
  if (g.partial != nullptr) {
    *reinterpret_cast<float2*>(g.partial + item.slice * g.values + at) = sum;
    return;
  }
  const int inside = static_cast<int>(min(max(g.inputs - input, int64_t{0}), int64_t{2}));
  g.target.store_pair<T>(e.weight, at, output < g.outputs ? inside : 0, sum);
}

// Of 8 x 8 sums, of which a lane has row l / 4 and columns 2 (l % 4) and the next, the same of the transposed.
__device__ inline float2 transposed(float first, float second) {
  const int lane = static_cast<int>(threadIdx.x) % 32, from = lane % 4 * 8 + lane / 8;
  const bool odd = lane / 4 % 2 != 0;
  const float a = __shfl_sync(~0u, first, from), b = __shfl_sync(~0u, second, from);
  const float c = __shfl_sync(~0u, first, from + 4), d = __shfl_sync(~0u, second, from + 4);
  return {odd ? b : a, odd ? d : c};
}

// The entries of a warp's cells, one a lane and some: read one by one between the stores, each would be waited for.
template <class K>
struct EntriesOfLanes {
  static constexpr int kEach = (K::cells * (K::cell == 8 ? 2 : 1) + 31) / 32;
  RegionEntry held[kEach];

  __device__ EntriesOfLanes(const RegionGradient& g, const RegionItem& item, const RegionCells<K>& cells) {
    const RegionEntry* entries = g.tables.entries + item.unit.first_entry;
    const int lane = static_cast<int>(threadIdx.x) % 32, count = cells.count * (K::cell == 8 ? 2 : 1);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = lane + 32 * i;
      held[i] = {-1, 0, 0};
      if (at < count) held[i] = entries[K::cell == 8 ? 2 * cells.first + at : entry_of(g, cells.first + at)];
    }
  }
  __device__ RegionEntry at(int i) const {
    const RegionEntry& e = held[i / 32];
    const uint32_t place = __shfl_sync(~0u, e.row | static_cast<uint32_t>(e.column) << 16, i % 32);
    return {__shfl_sync(~0u, e.weight, i % 32), static_cast<uint16_t>(place), static_cast<uint16_t>(place >> 16)};
  }
};

template <class K>
__device__ inline void store_region(const RegionGradient& g, const RegionItem& item, const RegionCells<K>& cells,
                                    const float (&sum)[K::cells][K::sums]) {
  using T = typename K::T;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const EntriesOfLanes<K> entries(g, item, cells);
#pragma unroll
  for (int j = 0; j < K::cells; ++j) {
    if (j >= cells.count) return;
    if constexpr (K::cell == 8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const RegionEntry e = entries.at(2 * j + i);
        const float2 pair = transposed(sum[j][2 * i], sum[j][2 * i + 1]);
        if (e.weight >= 0) store_region_pair<T>(g, item, e, lane / 4, lane % 4 * 2, pair);
      }
    } else {
      const RegionEntry e = entries.at(j);
      const CellInBlock at(g, cells.first + j);
      const int row = at.row * K::cell + lane / 4, column = at.column * K::cell + lane % 4 * 2;
      constexpr int kColumns = K::cell / 8;
#pragma unroll
      for (int k = 0; k < K::sums / 2; ++k) {  // pairs: 8 rows on, then 8 columns, then 16 rows
        const int rows = k % 2 * 8 + k / (2 * kColumns) * 16, columns = k / 2 % kColumns * 8;
        store_region_pair<T>(g, item, e, row + rows, column + columns, {sum[j][2 * k], sum[j][2 * k + 1]});
      }
    }
  }
}

}  // namespace
}  // namespace blocksparse::linear
