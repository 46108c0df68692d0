// The tables that the kernel `wgmma` walks, and W in the order of use. A small kernel makes them anew in every call.
// They depend on the layout alone, but this way a layout's own tables stay small, and a layout that a card made needs
// no further ones.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "blocksparse/status.h"
#include "gemm/cuda/call.h"
#include "gemm/cuda/wgmma/plan.h"

namespace blocksparse::gemm::wgmma {

// What a tile of outputs has in a chunk of inputs. Chunks in which it has nothing have no record.
//   W in place     a, b: rows of the boxes of the tile's two strips of 64 outputs, in W seen as [blocks b, b], or -1;
//                  c: their columns, low | high << 16
//   with patches   a, b: bits [part][patch of inputs][band of the part] (low, high word); c: the first of these
//   patches.
//                  More patches than a record takes make two records
struct alignas(16) Record {
  int32_t chunk;
  int32_t a, b, c;
};

// A tile of outputs and its records.
struct alignas(16) Tile {
  int32_t first, last;
  int32_t reserved[2];
  int32_t strips[4];  // strips of 64 outputs, one a warpgroup; missing ones lie beyond the last output
};

// The block that a patch is a copy of, or that a part of b x b of a patch is a copy of.
struct Source {
  int32_t weight;
  int32_t from;
};
inline constexpr int32_t kZeros = -1;    // `weight`: the part is filled up with zeros
inline constexpr int32_t kNoPatch = -2;  // `weight`: nothing walks the patch

struct Tables {
  Record* records;
  Tile* tiles;       // longest first
  int32_t* counter;  // tiles that were handed out after the first of each thread block
  Source* sources;   // [patches][outputs / b][inputs / b]
  char* patches;     // [patches][inputs / 8][outputs][8 inputs]: wgmma's core matrices without swizzle
  char* copy;        // [blocks, b, b]: gated, and 0 beyond the edge
  uint8_t* notes;    // null if no zeros stand for blocks
};

inline Tables tables_in(const Plan& plan, int32_t block, void* workspace) {
  auto* base = static_cast<char*>(workspace);
  const WorkspacePlaces at = workspace_places(plan, block);
  return {.records = reinterpret_cast<Record*>(base + at.records),
          .tiles = reinterpret_cast<Tile*>(base + at.tiles),
          .counter = reinterpret_cast<int32_t*>(base + at.counter),
          .sources = reinterpret_cast<Source*>(base + at.sources),
          .patches = base + at.patches,
          .copy = base + at.copy,
          .notes = plan.note_bytes == 0 ? nullptr : reinterpret_cast<uint8_t*>(base + at.notes)};
}

// Blocks whose gate is 0 are left out.
Status make_tables(const Plan& plan, const CudaCall& call, const DeviceWalk& walk, const float* gates,
                   const Tables& to);
Status prepare_tables();

struct PackedWeights {
  const void* w;
  const float* gates;  // null: 1
  DType dtype;
};

// Copies W times its gates: to the patches (after make_tables), or block by block where copies_w says so.
Status pack_weights(const Plan& plan, const CudaCall& call, const DeviceWalk& walk, const PackedWeights& w,
                    const Tables& to);
Status prepare_pack();

}  // namespace blocksparse::gemm::wgmma
