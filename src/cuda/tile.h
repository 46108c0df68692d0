// Tiles of operands in shared memory, any strides: how they get there, and how a product of two is pipelined.
//
// An operand has an `across` side (rows of the product's left operand, columns of its right one) and the `depth` that
// is summed over. Memory is contiguous along one of them, and so is the tile: it is read either way.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "cuda/number.h"
#include "cuda/ptx/copy.h"

namespace blocksparse::cuda {

inline constexpr int kThreads = 128;
inline constexpr int kTileRows = 64;  // across the left operand
inline constexpr int kVectorBytes = 16;

template <class T>
inline constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(T));
template <class T>
inline constexpr int kDepth = 128 / static_cast<int>(sizeof(T));  // rows of 128 bytes

// Elements from row to row: an odd number of vectors, so that 8 rows meet all banks.
template <class T>
constexpr int pitch_of(int row) {
  return (row / kVector<T> | 1) * kVector<T>;
}

template <class T>
struct Tile {
  T* data;
  int pitch;
  bool depth_contiguous;

  __device__ T* at(int across, int depth) const {
    return data + (depth_contiguous ? across * pitch + depth : depth * pitch + across);
  }
};

template <class T, int Across>
struct TileShape {
  static constexpr int elements = std::max(Across * pitch_of<T>(kDepth<T>), kDepth<T>* pitch_of<T>(Across));
  __device__ static Tile<T> make(T* data, bool depth_contiguous) {
    return {data, depth_contiguous ? pitch_of<T>(kDepth<T>) : pitch_of<T>(Across), depth_contiguous};
  }
};

// Where something along one side of a tile lies: its offset in elements, and how many from there on are inside; what is
// outside counts as 0 and is never read.
struct Place {
  int64_t offset;
  int64_t left;
};

// A vector of which the first `count` elements are there. Without alignment element by element, at once.
template <class T>
__device__ inline void copy_vector(T* to, const T* from, int count, bool aligned) {
  if (aligned) {
    ptx::cp_async_16(to, from, count * static_cast<int>(sizeof(T)));
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kVector<T>; ++i) to[i] = i < count ? from[i] : T{};
}

// Starts the copy of a tile. Element (across, depth) lies at base[across(i).offset + depth(k).offset]. Both orders go
// through one loop: four loops in a kernel took ptxas three times as long.
template <int Across, class T, class AcrossPlace, class DepthPlace>
__device__ inline void load_tile(const Tile<T>& tile, const T* base, bool aligned, AcrossPlace across,
                                 DepthPlace depth) {
  constexpr int kVectors = Across * 8;
  const int shift = tile.depth_contiguous ? 3 : std::countr_zero(static_cast<unsigned>(Across / kVector<T>));
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < kVectors; i += kThreads) {
    const int row = i >> shift, column = (i & ((1 << shift) - 1)) * kVector<T>;
    const Place a = across(tile.depth_contiguous ? row : column), d = depth(tile.depth_contiguous ? column : row);
    const int64_t along = tile.depth_contiguous ? d.left : a.left, rows = tile.depth_contiguous ? a.left : d.left;
    const int count = rows > 0 ? static_cast<int>(min(max(along, int64_t{0}), int64_t{kVector<T>})) : 0;
    copy_vector(tile.data + row * tile.pitch + column, count > 0 ? base + a.offset + d.offset : base, count, aligned);
  }
}

// load(step, stage) starts the copies of a step, compute(stage) uses them; loads run Stages - 1 steps ahead. All copies
// are done, and shared memory is free, when it returns.
template <int Stages, class Load, class Compute>
__device__ inline void pipeline(int64_t steps, Load load, Compute compute) {
#pragma unroll 1
  for (int64_t step = 1 - Stages; step < steps; ++step) {
    if (step >= 0) {
      ptx::cp_async_wait<Stages - 2>();
      __syncthreads();  // this step has arrived, and all threads are done with the one before, whose stage is next
    }
    const int64_t ahead = step + Stages - 1;
    if (ahead < steps) load(ahead, static_cast<int>(ahead % Stages));
    ptx::cp_async_commit();
    if (step >= 0) compute(static_cast<int>(step % Stages));
  }
  ptx::cp_async_wait<0>();
  __syncthreads();
}

}  // namespace blocksparse::cuda
