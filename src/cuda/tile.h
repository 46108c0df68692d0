// Tiles of operands in shared memory, for operands of any strides: how they are loaded, and how a product of two tiles
// is pipelined.
//
// An operand has an `across` side (rows of the product's left operand, columns of its right one) and the `depth` that
// is summed over. Memory is contiguous along one of them, and so is the tile; products read it either way.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/ceil_div.h"
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

// A place along one side of a tile: its offset in elements, and how many elements from it on are inside the matrix.
// Beyond the matrix the depth counts as 0. Across it nothing is loaded, and sums there mean nothing.
struct Place {
  int64_t offset;
  int left;
};

// A side whose places are evenly spaced from the operand's base.
struct Even {
  int64_t stride;
  int left;
  __device__ Place operator()(int i) const { return {i * stride, left - i}; }
};

// Copies one vector for each row of a thread's column. source(i) gives the address and whether the row exists. Aligned
// memory is copied in the background, other memory element by element at once.
template <bool RowsAreDepth, int Rows, int Columns, class T, class Source>
__device__ inline void copy_column(T* to, int first, int inside, bool aligned, Source source) {
  constexpr int kStep = kThreads / (Columns / kVector<T>), kPitch = pitch_of<T>(Columns);
  const int bytes = inside * static_cast<int>(sizeof(T));
  if (aligned) {
#pragma unroll
    for (int i = 0; i < ceil_div(Rows, kStep); ++i) {
      if (Rows % kStep != 0 && first + i * kStep >= Rows) return;
      const auto [from, there] = source(i);
      if (RowsAreDepth || there) ptx::cp_async_16(to + i * kStep * kPitch, from, there ? bytes : 0);
    }
  } else {
#pragma unroll 1
    for (int i = 0; first + i * kStep < Rows; ++i) {
      const auto [from, there] = source(i);
#pragma unroll 1
      for (int e = 0; e < kVector<T>; ++e) to[i * kStep * kPitch + e] = there && e < inside ? from[e] : T{};
    }
  }
}

// Copies rows of `Columns` elements. A thread has one column of vectors, so it asks for that column's place only once.
template <bool RowsAreDepth, int Rows, int Columns, class T, class RowPlace, class ColumnPlace>
__device__ inline void copy_rows(T* to, const T* base, bool aligned, RowPlace row_place, ColumnPlace column_place) {
  constexpr int kVectors = Columns / kVector<T>, kStep = kThreads / kVectors;
  static_assert(kThreads % kVectors == 0);
  struct Source {
    const T* from;
    bool there;
  };
  const int first = static_cast<int>(threadIdx.x) / kVectors,
            column = static_cast<int>(threadIdx.x) % kVectors * kVector<T>;
  const Place c = column_place(column);
  const int inside = min(c.left, kVector<T>);
  if (!RowsAreDepth && inside <= 0) {  // the depth has ended
    copy_column<true, Rows, Columns>(to + first * pitch_of<T>(Columns) + column, first, 0, true,
                                     [&](int) { return Source{base, false}; });
    return;
  }
  if (inside <= 0) return;
  to += first * pitch_of<T>(Columns) + column;
  base += c.offset;
  if constexpr (std::is_same_v<RowPlace, Even>) {  // one step from row to row is all that is needed
    const T* from = base + first * row_place.stride;
    const int64_t step = kStep * row_place.stride;
    copy_column<RowsAreDepth, Rows, Columns>(to, first, inside, aligned, [&](int i) {
      const bool there = first + i * kStep < row_place.left;
      return Source{there ? from + i * step : base, there};
    });
  } else {
    copy_column<RowsAreDepth, Rows, Columns>(to, first, inside, aligned, [&](int i) {
      const Place r = row_place(first + i * kStep);
      return Source{r.left > 0 ? base + r.offset : base, r.left > 0};
    });
  }
}

// Starts the copy of a tile. Element (across, depth) lies at base[across(i).offset + depth(k).offset].
template <int Across, class T, class AcrossPlace, class DepthPlace>
__device__ inline void load_tile(const Tile<T>& tile, const T* base, bool aligned, AcrossPlace across,
                                 DepthPlace depth) {
  if (tile.depth_contiguous) copy_rows<false, Across, kDepth<T>>(tile.data, base, aligned, across, depth);
  else copy_rows<true, kDepth<T>, Across>(tile.data, base, aligned, depth, across);
}

// load(step, stage) starts the copies of a step, compute(stage) uses them. Loads run Stages - 1 steps ahead. On return
// all copies are done and shared memory is free.
template <int Stages, class Load, class Compute>
__device__ inline void pipeline(int64_t steps, Load load, Compute compute) {
#pragma unroll 1
  for (int64_t step = 1 - Stages; step < steps; ++step) {
    if (step >= 0) {
      ptx::cp_async_wait<Stages - 2>();
      __syncthreads();  // this step has arrived, and all threads are done with the step before, whose stage is loaded
                        // next
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
