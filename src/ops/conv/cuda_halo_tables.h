// What the kernel for b = 32 walks, made anew by every call: the blocks of each tile of outputs by their chunk of
// channels, and W in wgmma's order.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/conv/select_halo.h"
#include "ops/linear/cuda.h"
#include "ops/linear/cuda_many_walk.h"

namespace blocksparse::conv {

// Records are {chunk of 64 channels, output block of the tile, first 16 bytes of the block in the chunk, its place in
// the list}; cells are [blocks][taps][inputs / 8][outputs][8 inputs].
inline linear::ManyTables halo_tables(const HaloBlocksPlan& plan, void* workspace) {
  auto* base = static_cast<char*>(workspace);
  return {.records = reinterpret_cast<linear::ManyRecord*>(base + plan.records),
          .ranges = reinterpret_cast<int2*>(base + plan.ranges),
          .order = reinterpret_cast<int32_t*>(base + plan.order),
          .counter = reinterpret_cast<int32_t*>(base + plan.counter),
          .sources = nullptr,
          .cells = base + plan.cells,
          .copy = nullptr};
}

Status make_halo_tables(const Product& p, const HaloBlocksPlan& plan, const linear::ManyTables& to,
                        cudaStream_t stream);
Status prepare_halo_tables();

}  // namespace blocksparse::conv
