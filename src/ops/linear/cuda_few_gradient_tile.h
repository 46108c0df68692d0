// What a warp of the gradient `few` does with some units of dW that share their dy: loads, products, the places of sums.
// A unit is a block of 8, 16 or 32, or a 32 x 32 part of a larger one; operands lie as cuda_few_gradient_pack.h says.
#pragma once

#include "cuda/number.h"
#include "cuda/ptx/load.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/movmatrix.h"
#include "ops/linear/cuda.h"

namespace blocksparse::linear {
namespace {

struct FewGradient {
  const BlockRef* refs;
  const int32_t *out_of, *starts;
  const uint4 *x, *dy;  // packed
  int32_t chunks;       // of 32 tokens
  int32_t units, tiles;
  int32_t warps;        // that share the tiles, or a tile
  int32_t shift, side;  // log2 of b, and of the units of a block's side
  int64_t outputs, inputs;
  void* dw;
  bool wide, accumulate, vectors, w_vectors;  // vectors: of 16 bytes, dW's and W's rows begin there
  const float* gates;
  const void* w;
  float* gate_sums;  // [units], null: not asked for
};

// By number: the unit of inputs and of outputs, and where it begins in dW, in units of U elements.
struct GradientUnit {
  int32_t input, output;
  uint32_t at;
};

// Units of a row of W go strip by strip, so that those that follow each other share dy.
template <int U>
__device__ inline GradientUnit gradient_unit(const FewGradient& g, int u) {
  if (u >= g.units) u = g.units - 1;
  if (U < 32 || g.side == 0) return {g.refs[u].from, g.out_of[u], static_cast<uint32_t>(u) * U};
  const int row = g.out_of[u >> 2 * g.side], first = g.starts[row];
  const int strip = (g.starts[row + 1] - first) << g.side, rest = u - (first << 2 * g.side);
  const int out = rest / strip, of_strip = rest - out * strip;
  const int block = first + (of_strip >> g.side), in = of_strip & ((1 << g.side) - 1);
  return {(g.refs[block].from << g.side) + in, (row << g.side) + out,
          (static_cast<uint32_t>(block) << 2 * g.shift - 5) + (static_cast<uint32_t>(out) << g.shift) +
              static_cast<uint32_t>(in)};
}

template <class T, int U, int Groups>
struct GradientTile {
  static constexpr int kGroups = Groups;       // of 8 inputs, of all units
  static constexpr int kOfUnit = U / 8;        // groups
  static constexpr int kUnits = Groups / kOfUnit;
  static constexpr int kSums = U == 8 ? Groups / 2 : U / 16 * Groups;  // in fours
  static constexpr int kRow = U / 4;           // inputs beside each other that a lane has
  using Sums = float[kSums][4];
  using Inputs = uint32_t[Groups][4];
  using Outputs = uint32_t[kOfUnit][4];

  __device__ static void load(uint32_t (*to)[4], const uint4* packed, int chunks, int unit, int chunk) {
    const uint4* from = packed + (int64_t{unit} * chunks + chunk) * kOfUnit * 32 + threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kOfUnit; ++j) ptx::ld_16(to[j], from + 32 * j);
  }

  // 32 tokens.
  __device__ static void multiply(const Inputs& x, const Outputs& dy, Sums& sum) {
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      if constexpr (U == 8) {  // two blocks are mma's rows
        const uint32_t b[2] = {dy[0][k], dy[0][k + 1]};
#pragma unroll
        for (int q = 0; q < kSums; ++q) {
          const uint32_t a[4] = {x[2 * q][k], x[2 * q + 1][k], x[2 * q][k + 1], x[2 * q + 1][k + 1]};
          ptx::mma_m16n8k16(sum[q], a, b, T{});
        }
      } else {
#pragma unroll
        for (int m = 0; m < U / 16; ++m) {
          const uint32_t a[4] = {dy[2 * m][k], dy[2 * m + 1][k], dy[2 * m][k + 1], dy[2 * m + 1][k + 1]};
#pragma unroll
          for (int j = 0; j < Groups; ++j) {
            const uint32_t b[2] = {x[j][k], x[j][k + 1]};
            ptx::mma_m16n8k16(sum[m * Groups + j], a, b, T{});
          }
        }
      }
    }
  }

  // body(output, input, values[kRow]) for the rows of a unit that this lane has.
  template <class Body>
  __device__ static void for_each_row(const Sums& sum, int unit, Body body) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
    float row[kRow];
    if constexpr (U == 8) {
      // The lane has input g of outputs 2 t and 2 t + 1: upper and lower halves are turned.
      const uint32_t a = __float_as_uint(sum[unit / 2][unit % 2 * 2]), b = __float_as_uint(sum[unit / 2][unit % 2 * 2 + 1]);
      const uint32_t high = ptx::movmatrix_trans(__byte_perm(a, b, 0x7632));
      const uint32_t low = ptx::movmatrix_trans(__byte_perm(a, b, 0x5410));
      row[0] = __uint_as_float(__byte_perm(low, high, 0x5410)), row[1] = __uint_as_float(__byte_perm(low, high, 0x7632));
      body(g, 2 * t, row);
    } else {
#pragma unroll
      for (int i = 0; i < U / 8; ++i) {
#pragma unroll
        for (int k = 0; k < kRow; ++k) {
          row[k] = sum[i / 2 * Groups + unit * kOfUnit + k / 2][i % 2 * 2 + k % 2];
        }
        body(kRow * (g / 2) + 2 * i + g % 2, kRow * t, row);
      }
    }
  }
};

// ---- Store ----------------------------------------------------------------------------------------------------------

template <int Count>
__device__ inline void store_floats(float* to, const float (&row)[Count], int column) {
  if constexpr (Count == 8) {
    // Lanes beside each other exchange halves, so that each store fills sectors of 32 bytes.
    const bool odd = column / 8 % 2 != 0;
    float4 own = odd ? float4{row[4], row[5], row[6], row[7]} : float4{row[0], row[1], row[2], row[3]};
    float4 other = odd ? float4{row[0], row[1], row[2], row[3]} : float4{row[4], row[5], row[6], row[7]};
    other = {__shfl_xor_sync(~0u, other.x, 1), __shfl_xor_sync(~0u, other.y, 1), __shfl_xor_sync(~0u, other.z, 1),
             __shfl_xor_sync(~0u, other.w, 1)};
    *reinterpret_cast<float4*>(odd ? to - 4 : to) = odd ? other : own;
    *reinterpret_cast<float4*>(odd ? to + 4 : to + 8) = odd ? own : other;
  } else if constexpr (Count == 4) {
    *reinterpret_cast<float4*>(to) = {row[0], row[1], row[2], row[3]};
  } else {
    *reinterpret_cast<float2*>(to) = {row[0], row[1]};
  }
}

template <class T, int Count>
__device__ inline void store_halves(T* to, const float (&row)[Count]) {
  uint32_t words[Count / 2];
#pragma unroll
  for (int i = 0; i < Count / 2; ++i) words[i] = narrow_pair(row[2 * i], row[2 * i + 1], T{});
  if constexpr (Count == 8) *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
  else if constexpr (Count == 4) *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
  else *reinterpret_cast<uint32_t*>(to) = words[0];
}

template <class V, int Count>
struct alignas(Count * sizeof(V) < 16 ? Count * sizeof(V) : 16) WholeRow {
  V v[Count];
};

// `inside` of them lie in the matrix; the others are 0.
template <class V, int Count>
__device__ inline void read_row(float (&row)[Count], const V* from, bool vectors, int inside) {
  if (vectors && inside >= Count) {
    const auto whole = *reinterpret_cast<const WholeRow<V, Count>*>(from);
#pragma unroll
    for (int i = 0; i < Count; ++i) row[i] = widen(whole.v[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < Count; ++i) row[i] = i < inside ? widen(from[i]) : 0;
}

// With gates, what was there, ragged edges, any alignment. Beyond the edge there are zeros, or what there was.
template <class T, int Count>
__device__ inline void store_row(const FewGradient& g, int64_t at, float gate, int inside, float (&row)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) row[i] = i < inside && gate != 0 ? gate * row[i] : 0;
  const auto store = [&](auto* to) {
    using V = std::remove_reference_t<decltype(*to)>;
    float before[Count];
    if (g.accumulate) {
      read_row(before, to, g.vectors, inside);
#pragma unroll
      for (int i = 0; i < Count; ++i) row[i] += before[i];
    }
    if (g.vectors && (inside >= Count || !g.accumulate)) {
      WholeRow<V, Count> whole;
#pragma unroll
      for (int i = 0; i < Count; ++i) whole.v[i] = narrow<V>(row[i]);
      *reinterpret_cast<WholeRow<V, Count>*>(to) = whole;
      return;
    }
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if (i < inside || !g.accumulate) to[i] = narrow<V>(row[i]);
    }
  };
  if (g.wide) store(static_cast<float*>(g.dw) + at);
  else store(static_cast<T*>(g.dw) + at);
}

// Unit number `unit` of the tile to dW.
template <class Tile, class T, int U, bool Plain>
__device__ inline void store_unit(const FewGradient& g, const GradientUnit& of, const typename Tile::Sums& sum, int unit) {
  const int64_t first = int64_t{of.at} * U;
  if constexpr (Plain) {
    Tile::for_each_row(sum, unit, [&](int output, int input, const float (&row)[Tile::kRow]) {
      const int64_t at = first + (output << g.shift) + input;
      if (g.wide) store_floats(static_cast<float*>(g.dw) + at, row, input);
      else store_halves(static_cast<T*>(g.dw) + at, row);
    });
  } else {
    constexpr int kLog = U == 8 ? 3 : U == 16 ? 4 : 5;
    const uint32_t block = of.at >> (2 * g.shift - kLog), rest = of.at & ((1u << (2 * g.shift - kLog)) - 1);
    const float gate = g.gates == nullptr ? 1 : g.gates[block];
    float gate_sum = 0;
    Tile::for_each_row(sum, unit, [&](int output, int input, float (&row)[Tile::kRow]) {
      const int64_t at = first + (output << g.shift) + input;
      const int64_t left = int64_t{of.output} * U + output < g.outputs ? g.inputs - int64_t{of.input} * U - input : 0;
      const int inside = static_cast<int>(min(max(left, int64_t{0}), int64_t{Tile::kRow}));
      if (g.gate_sums != nullptr) {
        float w[Tile::kRow];
        read_row(w, static_cast<const T*>(g.w) + at, g.w_vectors, inside);
#pragma unroll
        for (int i = 0; i < Tile::kRow; ++i) {
          if (i < inside) gate_sum += row[i] * w[i];
        }
      }
      store_row<T>(g, at, gate, inside, row);
    });
    if (g.gate_sums == nullptr) return;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) gate_sum += __shfl_xor_sync(~0u, gate_sum, step);
    // The parts of a block one behind the other, [outputs][inputs].
    const uint32_t part = (block << 2 * g.side) + (rest >> g.shift << g.side) + (rest & ((1u << g.shift) - 1));
    if (threadIdx.x % 32 == 0) g.gate_sums[U < 32 || g.side == 0 ? block : part] = gate_sum;
  }
}

}  // namespace
}  // namespace blocksparse::linear
