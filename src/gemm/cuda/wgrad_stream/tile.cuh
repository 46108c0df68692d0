// What a warp of the gradient `wgrad_stream` does with patches of dW that share their dy: it loads, multiplies and
// stores. A patch is a block of 8, 16 or 32, or a 32 x 32 part of a larger one. Operands lie as pack.h says.
#pragma once

#include "cuda/number.h"
#include "cuda/ptx/load.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/movmatrix.h"
#include "cuda/turn_quad.h"
#include "gemm/cuda/call.h"
#include "gemm/cuda/wgrad_stream/plan.h"

namespace blocksparse::gemm::wgrad_stream {
namespace {

struct Args {
  const BlockRef* refs;
  const int32_t *out_of, *starts;
  const uint4 *x, *dy;  // packed
  int32_t chunks;       // of 32 tokens, f32: 16
  int32_t patches, tiles;
  int32_t warps;        // that share the tiles (held), or that share a tile (deep)
  int32_t shift, side;  // log2 of b, and of the patches of a block's side
  int64_t outputs, inputs;
  void* dw;
  bool wide, accumulate, vectors, w_vectors;  // vectors: of 16 bytes, dW's and W's rows begin there
  const float* gates;
  const void* w;
  float* gate_sums;  // [patches], null: not asked for
};

// How dW is stored: 16 bits or f32 without anything else, or `any`, which has gates, accumulation, edges and any
// address.
enum class Store { narrow, wide, any };

// A patch by its number: its inputs, its outputs, and its place in dW in units of U elements.
struct DwTile {
  int32_t input, output;
  uint32_t at;
};

// The patches of a row of W go strip by strip, so that neighbours share dy.
template <int U>
__device__ inline DwTile dw_tile_of(const Args& g, int u) {
  if (u >= g.patches) u = g.patches - 1;
  if (U < 32 || g.side == 0) return {g.refs[u].from, g.out_of[u], static_cast<uint32_t>(u) * U};
  const int row = g.out_of[u >> 2 * g.side], first = g.starts[row];
  const int strip = (g.starts[row + 1] - first) << g.side, rest = u - (first << 2 * g.side);
  const int out = rest / strip, of_strip = rest - out * strip;
  const int block = first + (of_strip >> g.side), in = of_strip & ((1 << g.side) - 1);
  return {(g.refs[block].from << g.side) + in, (row << g.side) + out,
          (static_cast<uint32_t>(block) << 2 * g.shift - 5) + (static_cast<uint32_t>(out) << g.shift) +
              static_cast<uint32_t>(in)};
}

// Adds the product of a fragment's words k and k + 1: 16 tokens, or 8 of f32 in tf32.
template <class T>
__device__ inline void add_chunk(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (sizeof(T) == 4) ptx::mma_m16n8k8_tf32(sum, a, b[0], b[1]);
  else ptx::mma_m16n8k16(sum, a, b, T{});
}

template <class T, int U, int Groups>
struct Tile {
  static constexpr int kGroups = Groups;  // of 8 inputs, of all patches
  static constexpr int kOfPatch = U / 8;  // groups
  static constexpr int kPatches = Groups / kOfPatch;
  static constexpr int kSums = U == 8 ? Groups / 2 : U / 16 * Groups;  // in fours
  static constexpr int kRow = U / 4;                                   // inputs beside each other that a lane has
  using Sums = float[kSums][4];
  using Inputs = uint32_t[Groups][4];
  using Outputs = uint32_t[kOfPatch][4];

  __device__ static void load(uint32_t (*to)[4], const uint4* packed, int chunks, int patch, int chunk) {
    const uint4* from = packed + (int64_t{patch} * chunks + chunk) * kOfPatch * 32 + threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kOfPatch; ++j) ptx::ld_16(to[j], from + 32 * j);
  }

  // Adds the products of a chunk.
  __device__ static void multiply(const Inputs& x, const Outputs& dy, Sums& sum) {
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      if constexpr (U == 8) {  // two blocks are mma's rows
        const uint32_t b[2] = {dy[0][k], dy[0][k + 1]};
#pragma unroll
        for (int q = 0; q < kSums; ++q) {
          const uint32_t a[4] = {x[2 * q][k], x[2 * q + 1][k], x[2 * q][k + 1], x[2 * q + 1][k + 1]};
          add_chunk<T>(sum[q], a, b);
        }
      } else {
#pragma unroll
        for (int m = 0; m < U / 16; ++m) {
          const uint32_t a[4] = {dy[2 * m][k], dy[2 * m + 1][k], dy[2 * m][k + 1], dy[2 * m + 1][k + 1]};
#pragma unroll
          for (int j = 0; j < Groups; ++j) {
            const uint32_t b[2] = {x[j][k], x[j][k + 1]};
            add_chunk<T>(sum[m * Groups + j], a, b);
          }
        }
      }
    }
  }

  // Calls body(output, input, values[kRow]) for the rows of a patch of which this lane has a part.
  template <class Body>
  __device__ static void for_each_row(const Sums& sum, int patch, Body body) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
    float row[kRow];
    if constexpr (U == 8) {
      // The lane has input g of outputs 2 t and 2 t + 1; the upper and the lower 16 bits are transposed.
      const uint32_t a = __float_as_uint(sum[patch / 2][patch % 2 * 2]),
                     b = __float_as_uint(sum[patch / 2][patch % 2 * 2 + 1]);
      const uint32_t high = ptx::movmatrix_trans(__byte_perm(a, b, 0x7632));
      const uint32_t low = ptx::movmatrix_trans(__byte_perm(a, b, 0x5410));
      row[0] = __uint_as_float(__byte_perm(low, high, 0x5410)),
      row[1] = __uint_as_float(__byte_perm(low, high, 0x7632));
      body(g, 2 * t, row);
    } else {
#pragma unroll
      for (int i = 0; i < U / 8; ++i) {
#pragma unroll
        for (int k = 0; k < kRow; ++k) {
          row[k] = sum[i / 2 * Groups + patch * kOfPatch + k / 2][i % 2 * 2 + k % 2];
        }
        body(kRow * (g / 2) + 2 * i + g % 2, kRow * t, row);
      }
    }
  }
};

// ---- Store ----------------------------------------------------------------------------------------------------------

// A store fills a line of 128 bytes by one instruction. Halves of lines take 1.5 to 2 times as long, sectors 3 times
// (12288 x 12288, density .1, n = 32, H200, 2026-11-21).

__device__ inline uint4 shuffle_xor(const uint4& v, int mask) {
  return {__shfl_xor_sync(~0u, v.x, mask), __shfl_xor_sync(~0u, v.y, mask), __shfl_xor_sync(~0u, v.z, mask),
          __shfl_xor_sync(~0u, v.w, mask)};
}

// Chooses word by word: vectors chosen as a whole would be put into local memory.
__device__ inline uint4 choose(bool first, const uint4& a, const uint4& b) {
  return {first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w};
}

// Lanes g and g + 1 (g even) have 16 bytes twice, of two neighbouring rows. Each stores one half of both rows.
template <class V>
__device__ inline void store_two_rows(V* row, int pitch, int column, int next, const uint4& low, const uint4& high) {
  const bool odd = threadIdx.x / 4 % 2 != 0;
  const uint4 other = shuffle_xor(choose(odd, low, high), 4);
  V* to = row - (odd ? pitch : 0) + column + (odd ? next : 0);
  *reinterpret_cast<uint4*>(to) = choose(odd, other, low);
  *reinterpret_cast<uint4*>(to + pitch) = choose(odd, high, other);
}

template <class T, int Count>
__device__ inline void narrow_row(const float (&row)[Count], uint32_t (&words)[Count / 2]) {
#pragma unroll
  for (int i = 0; i < Count / 2; ++i) words[i] = narrow_pair(row[2 * i], row[2 * i + 1], T{});
}

// Stores a patch of dW in f32.
template <class Tile, int U>
__device__ inline void store_wide(const Args& g, uint32_t at, const typename Tile::Sums& sum, int patch) {
  float* first = static_cast<float*>(g.dw) + int64_t{at} * U;
  Tile::for_each_row(sum, patch, [&](int output, int input, const float(&row)[Tile::kRow]) {
    float* to = first + (output << g.shift);
    if constexpr (U == 32) {
      const auto four = [&row](int i) -> uint4 {
        return {__float_as_uint(row[i]), __float_as_uint(row[i + 1]), __float_as_uint(row[i + 2]),
                __float_as_uint(row[i + 3])};
      };
      store_two_rows(to, 1 << g.shift, input, 4, four(0), four(4));
    } else if constexpr (U == 16) {
      *reinterpret_cast<float4*>(to + input) = {row[0], row[1], row[2], row[3]};
    } else {
      *reinterpret_cast<float2*>(to + input) = {row[0], row[1]};
    }
  });
}

// Stores a block of 16 or 32, or one patch of a larger block.
template <class Tile, class T, int U>
__device__ inline void store_narrow(const Args& g, uint32_t at, const typename Tile::Sums& sum, int patch) {
  T* first = static_cast<T*>(g.dw) + int64_t{at} * U;
  uint32_t before[Tile::kRow / 2];
  bool second = false;
  Tile::for_each_row(sum, patch, [&](int output, int input, const float(&row)[Tile::kRow]) {
    uint32_t words[Tile::kRow / 2];
    narrow_row<T>(row, words);
    if constexpr (U == 32) {
      *reinterpret_cast<uint4*>(first + (output << g.shift) + input) = {words[0], words[1], words[2], words[3]};
    } else if (!second) {  // the first of two rows, whose halves neighbouring lanes exchange
      before[0] = words[0], before[1] = words[1];
      second = true;
    } else {
      const bool odd = threadIdx.x % 2 != 0;
      const uint32_t x = __shfl_xor_sync(~0u, odd ? before[0] : words[0], 1);
      const uint32_t y = __shfl_xor_sync(~0u, odd ? before[1] : words[1], 1);
      T* to = first + ((output - (odd ? 0 : 2)) << 4) + (input & ~7);
      *reinterpret_cast<uint4*>(to) = choose(odd, {x, y, words[0], words[1]}, {before[0], before[1], x, y});
    }
  });
}

// Stores two patches of a block side by side: 64 columns.
template <class Tile, class T>
__device__ inline void store_narrow_pair(const Args& g, uint32_t at, const typename Tile::Sums& sum) {
  T* first = static_cast<T*>(g.dw) + int64_t{at} * 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int lane = static_cast<int>(threadIdx.x) % 32, output = 8 * (lane / 8) + 2 * i + lane / 4 % 2;
    uint32_t words[2][4];
#pragma unroll
    for (int patch = 0; patch < 2; ++patch) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float(&of)[4] = sum[i / 2 * Tile::kGroups + patch * 4 + k];
        words[patch][k] = narrow_pair(of[i % 2 * 2], of[i % 2 * 2 + 1], T{});
      }
    }
    store_two_rows(first + (output << g.shift), 1 << g.shift, lane % 4 * 8, 32,
                   {words[0][0], words[0][1], words[0][2], words[0][3]},
                   {words[1][0], words[1][1], words[1][2], words[1][3]});
  }
}

// Stores four blocks of 8; a lane stores a row of one. `at` belongs to the lane's block, which `wanted` may leave out.
template <class Tile, class T>
__device__ inline void store_narrow_blocks(const Args& g, uint32_t at, bool wanted, const typename Tile::Sums& sum,
                                           int patch) {
  uint32_t words[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float(&of)[4] = sum[(patch + r) / 2];
    words[r] = ptx::movmatrix_trans(narrow_pair(of[r % 2 * 2], of[r % 2 * 2 + 1], T{}));
  }
  cuda::turn_quad(words);
  T* to = static_cast<T*>(g.dw) + int64_t{at} * 8 + threadIdx.x % 32 / 4 * 8;
  if (wanted) *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
}

template <class V, int Count>
struct alignas(Count * sizeof(V) < 16 ? Count * sizeof(V) : 16) WholeRow {
  V v[Count];
};

// Reads a row, of which `inside` elements lie in the matrix; the others are 0.
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

// Stores with gates, accumulation, ragged edges and any alignment. Beyond the edge dW gets zeros, or keeps what it has.
template <class T, int Count>
__device__ inline void store_row(const Args& g, int64_t at, float gate, int inside, float (&row)[Count]) {
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

// Stores patch number `patch` of the tile, with all that a call may ask for.
template <class Tile, class T, int U>
__device__ inline void store_any(const Args& g, const DwTile& of, const typename Tile::Sums& sum, int patch) {
  const int64_t first = int64_t{of.at} * U;
  constexpr int kLog = U == 8 ? 3 : U == 16 ? 4 : 5;
  const uint32_t block = of.at >> (2 * g.shift - kLog), rest = of.at & ((1u << (2 * g.shift - kLog)) - 1);
  const float gate = g.gates == nullptr ? 1 : g.gates[block];
  float gate_sum = 0;
  Tile::for_each_row(sum, patch, [&](int output, int input, float(&row)[Tile::kRow]) {
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
  // The parts of a block lie one behind the other, [outputs][inputs].
  const uint32_t part = (block << 2 * g.side) + (rest >> g.shift << g.side) + (rest & ((1u << g.shift) - 1));
  if (threadIdx.x % 32 == 0) g.gate_sums[U < 32 || g.side == 0 ? block : part] = gate_sum;
}

// Stores patches first ... last - 1 of the tile. Lane `lane` + i knows patch i.
template <class Tile, class T, int U, Store Store>
__device__ inline void store_patches(const Args& g, const DwTile& known, int lane, int first, int last,
                                     const typename Tile::Sums& sum) {
  constexpr bool kNarrow = Store == Store::narrow;
  if constexpr (kNarrow && U == 8) {
#pragma unroll
    for (int patch = 0; patch < Tile::kPatches; patch += 4) {
      const int mine = patch + static_cast<int>(threadIdx.x) % 4;
      const uint32_t at = __shfl_sync(~0u, known.at, lane + mine);
      store_narrow_blocks<Tile, T>(g, at, mine >= first && mine < last, sum, patch);
    }
  } else if constexpr (kNarrow && U == 32 && Tile::kPatches == 2) {
    store_narrow_pair<Tile, T>(g, __shfl_sync(~0u, known.at, lane), sum);
  } else {
#pragma unroll
    for (int r = 0; r < Tile::kPatches; ++r) {
      const uint32_t at = __shfl_sync(~0u, known.at, lane + r);
      const int32_t input = __shfl_sync(~0u, known.input, lane + r), output = __shfl_sync(~0u, known.output, lane + r);
      if (r < first || r >= last) continue;
      if constexpr (kNarrow) store_narrow<Tile, T, U>(g, at, sum, r);
      else if constexpr (Store == Store::wide) store_wide<Tile, U>(g, at, sum, r);
      else store_any<Tile, T, U>(g, {input, output, at}, sum, r);
    }
  }
}

// The end of the run of patches from `first` on that have equal outputs; the tile has `count` patches.
template <class Tile>
__device__ inline int end_of_row(const DwTile& known, int lane, int first, int count) {
  const int output = __shfl_sync(~0u, known.output, lane + first);
  int last = first;
#pragma unroll
  for (int r = 0; r < Tile::kPatches; ++r) {
    const int other = __shfl_sync(~0u, known.output, lane + r);
    if (r == last && r < count && other == output) ++last;
  }
  return last;
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_stream
