// The tables that the kernel `many` walks, and W in the order of use. Every call makes them anew, by a small kernel:
// they depend on the layout alone, but so a layout's own tables stay small, and one that was made on the card needs no
// more.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "blocksparse/status.h"
#include "gemm/cuda/driver.h"
#include "gemm/cuda/wgmma/plan.h"

namespace blocksparse::gemm {

// What a tile of outputs has in a chunk of inputs; chunks in which it has nothing are left out. With W where it lies: a
// and b are the rows of the boxes of the tile's two strips of 64 outputs, in W seen as [blocks b, b], or -1, c their
// columns, low | high << 16. With cells: a and b are bits [part][cell of inputs][slot of the part] (low, high word), c
// the first of those cells. More cells than a record takes make two records.
struct alignas(16) ManyRecord {
  int32_t chunk;
  int32_t a, b, c;
};

// A tile of outputs and its records.
struct alignas(16) ManyTile {
  int32_t first, last;
  int32_t reserved[2];
  int32_t strips[4];  // of 64 outputs, one a warpgroup; what there are not lies beyond the last output
};

// The block that a cell, or a part of one of b x b, is a copy of.
struct ManySource {
  int32_t weight;
  int32_t from;
};
inline constexpr int32_t kZeros = -1;   // `weight`: the part is filled up
inline constexpr int32_t kNoCell = -2;  // nothing walks it

struct ManyTables {
  ManyRecord* records;
  ManyTile* tiles;      // longest first
  int32_t* counter;     // tiles that were handed out beyond the first of each thread block
  ManySource* sources;  // [cells][outputs / b][inputs / b]
  char* cells;          // [cells][inputs / 8][outputs][8 inputs]: wgmma's core matrices without swizzle
  char* copy;           // [blocks, b, b]: gated, and 0 beyond the edge
};

inline ManyTables many_tables(const ManyPlan& plan, int32_t block, void* workspace) {
  auto* base = static_cast<char*>(workspace);
  const ManyPlaces at = many_places(plan, block);
  return {.records = reinterpret_cast<ManyRecord*>(base + at.records),
          .tiles = reinterpret_cast<ManyTile*>(base + at.tiles),
          .counter = reinterpret_cast<int32_t*>(base + at.counter),
          .sources = reinterpret_cast<ManySource*>(base + at.sources),
          .cells = base + at.cells,
          .copy = base + at.copy};
}

// Blocks whose gate is 0 are left out.
Status make_many_tables(const ManyPlan& plan, const CudaCall& call, const DeviceWalk& walk, const float* gates,
                        const ManyTables& to);
Status prepare_many_tables();

struct ManyPackedWeights {
  const void* w;
  const float* gates;  // null: 1
  DType dtype;
};

// Copies W, times its gates, to the cells (behind make_many_tables), or as it lies where many_copies says so.
Status pack_many_weights(const ManyPlan& plan, const CudaCall& call, const DeviceWalk& walk, const ManyPackedWeights& w,
                         const ManyTables& to);
Status prepare_many_pack();

}  // namespace blocksparse::gemm
