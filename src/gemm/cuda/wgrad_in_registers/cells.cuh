// What a thread block of the kernel `regions` holds of dW, and how a stage of tokens reaches shared memory.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/tensor_map.h"
#include "gemm/cuda/gradient_target.cuh"
#include "gemm/cuda/wgrad_in_registers/units.h"

namespace blocksparse::gemm {
namespace {

struct RegionGradient {
  RegionTables tables;
  GradientTarget target;
  const void *x, *dy;
  int64_t x_stride, dy_stride;
  int64_t n, inputs, outputs;
  int32_t block, block_shift;
  int32_t wide_shift;  // cells of a block beside each other
  int32_t strips, strip_rows;
  int32_t slices, steps;
  int32_t stages, dy_boxes, boxes;  // boxes of a stage
  float* partial;                   // [slices][blocks, b, b]; null: straight to dW
  int64_t values;                   // of dW
  // For the last kernel.
  const BlockRef* refs;
  const int32_t* out_of;
  const void* w;
  float* dgates;
  int32_t blocks;
};

template <class E, int Cell>
struct RegionKernel {
  using T = E;
  static constexpr int cell = Cell, warps = region_form_of(Cell).warps, cells = region_form_of(Cell).cells_of_warp;
  static constexpr int threads = 32 * warps, cells_of_pass = warps * cells;
  static constexpr int sums = Cell == 32 ? 32 : Cell == 16 ? 8 : 4;  // of a lane, for each cell
  static constexpr int ahead = Cell == 8 ? 2 : 1;                    // cells of which x is under way
  // Cells between two questions whether there are more, for which all products so far must have ended. What is beyond
  // the last one is multiplied for nothing.
  static constexpr int together = Cell == 8 ? 2 : 1;
  static constexpr int registers = warps == 8 ? 240 : 160, load_registers = 24;
  static_assert(cells <= 64);
};

// A unit, and a slice of the tokens.
struct RegionItem {
  RegionUnit unit;
  int32_t strip, slice;
  int32_t first_step, last_step;
};

template <class K>
__device__ inline int cells_of_unit(const RegionGradient& g, const RegionUnit& unit) {
  return K::cell == 8 ? unit.entries / 2 : unit.entries << 2 * g.wide_shift;
}

// Cells of a block follow each other, row by row.
__device__ inline int entry_of(const RegionGradient& g, int cell) { return cell >> 2 * g.wide_shift; }

struct CellInBlock {
  int row, column;
  __device__ CellInBlock(const RegionGradient& g, int cell) {
    const int wide = 1 << g.wide_shift;
    row = cell >> g.wide_shift & (wide - 1);
    column = cell & (wide - 1);
  }
};

// What a stage holds of a unit.
struct RegionBoxes {
  int64_t output, input;  // the first: of a box, or some rows would be of two lines, which come at half the rate
  int outputs, inputs;    // in the matrix
  int dy_boxes, x_boxes;

  // Of the unit's features, behind those.
  __device__ static int64_t first_output(const RegionGradient& g, const RegionItem& item) {
    return int64_t{item.strip} * g.strip_rows << g.block_shift;
  }
  __device__ static int64_t first_input(const RegionGradient& g, const RegionItem& item) {
    return int64_t{item.unit.first_column} << g.block_shift;
  }

  __device__ RegionBoxes(const RegionGradient& g, const RegionItem& item) {
    const int64_t own_output = first_output(g, item), own_input = first_input(g, item);
    output = own_output & ~int64_t{63}, input = own_input & ~int64_t{63};
    outputs = static_cast<int>(min(own_output + (int64_t{g.strip_rows} << g.block_shift), g.outputs) - output);
    inputs = static_cast<int>(min(own_input + (int64_t{item.unit.columns} << g.block_shift), g.inputs) - input);
    dy_boxes = (outputs + 63) / 64;
    x_boxes = (inputs + 63) / 64;
  }
};

// What a warp has of a unit in one pass over the tokens.
template <class K>
struct RegionCells {
  int first, count;
  uint32_t offset[K::cells];  // in a stage, of this lane's part, in 16 bytes: of x in bits 16 and up, of dy in 12 bits
  uint32_t new_rows[2] = {};  // a bit for each cell whose dy is not that of the cell in front

  // One instruction with what it is added to: bits 12 to 15 are 0.
  __device__ uint32_t x_offset(int j) const { return offset[j] >> 12; }
  __device__ uint32_t dy_offset(int j) const { return offset[j] % 4096 * 16; }
  __device__ uint32_t is_new_row(int j) const { return new_rows[j / 32] & 1u << j % 32; }

  __device__ RegionCells(const RegionGradient& g, const RegionItem& item, int pass_first) {
    const int all = cells_of_unit<K>(g, item.unit), of_pass = min(all - pass_first, K::cells_of_pass);
    const int chunk = (of_pass + K::warps - 1) / K::warps, lane = static_cast<int>(threadIdx.x) % 32;
    first = pass_first + min(static_cast<int>(threadIdx.x) / 32 * chunk, of_pass);
    count = min(chunk, pass_first + of_pass - first);
    const RegionEntry* entries = g.tables.entries + item.unit.first_entry;
    // Of the four matrices of 8 x 8 that a warp loads at once, a left operand has the second side second, a right one
    // third.
    const int x_side = (K::cell == 8 ? 0 : lane / 16) + static_cast<int>(RegionBoxes::first_input(g, item) % 64 / 8);
    const int dy_side =
        (K::cell == 8 ? 0 : lane / 8 % 2) + static_cast<int>(RegionBoxes::first_output(g, item) % 64 / 8);
    int before = -1;
#pragma unroll
    for (int j = 0; j < K::cells; ++j) {
      offset[j] = in_stage(0) << 16 | in_stage(0);  // also where there is no cell: 0 would be one bank for all lanes
      if (j >= count) continue;
      int row, column;
      if constexpr (K::cell == 8) {
        const RegionEntry e = entries[2 * (first + j) + lane / 8 % 2];
        row = e.row, column = e.column;
      } else {
        const RegionEntry e = entries[entry_of(g, first + j)];
        const CellInBlock at(g, first + j);
        row = ((e.row << g.block_shift) + at.row * K::cell) / 8;
        column = ((e.column << g.block_shift) + at.column * K::cell) / 8;
      }
      offset[j] = in_stage(column + x_side) << 16 | in_stage(row + dy_side);
      if (row != before) new_rows[j / 32] |= 1u << j % 32;
      before = row;
    }
    // They are the same in all lanes, which the compiler does not see otherwise: it joined the warp at every cell.
    count = __shfl_sync(~0u, count, 0);
#pragma unroll
    for (uint32_t& rows : new_rows) rows = __shfl_sync(~0u, rows, 0);
  }

 private:
  // Where the 8 features are, from the first of dy or x on, in a row whose token is lane % 8 or multiples of 8 more.
  __device__ static uint32_t in_stage(int vector) {
    return static_cast<uint32_t>(vector / 8 * (kRegionBoxBytes / 16) + (vector ^ static_cast<int>(threadIdx.x)) % 8);
  }
};

// ---- Load -----------------------------------------------------------------------------------------------------------

// A token's row by a warp, of which `inside` of `features` are there, and the others become 0. Mostly all are: there
// the loop has five instructions, else 20.
__device__ inline void load_region_row(uint32_t boxes, int token, const uint16_t* row, int features, int inside) {
  const int lane = static_cast<int>(threadIdx.x) % 32, vectors = (features + 7) / 8;
  uint32_t to = boxes + static_cast<uint32_t>(lane / 8 * kRegionBoxBytes + token * 128 + (lane ^ token) % 8 * 16);
  row += 8 * lane;
  if (inside >= 8 * vectors) {
#pragma unroll 2
    for (int v = lane; v < vectors; v += 32, to += 4 * kRegionBoxBytes, row += 256) ptx::cp_async_16_at(to, row, 16);
    return;
  }
#pragma unroll 1
  for (int v = lane; v < vectors; v += 32, to += 4 * kRegionBoxBytes, row += 256) {
    const int bytes = 2 * min(max(inside - 8 * v, 0), 8);
    ptx::cp_async_16_at(to, bytes > 0 ? row : row - 8 * v, bytes);
  }
}

template <class K>
__device__ inline void load_region(const RegionGradient& g, const RegionItem& item, int64_t step, uint32_t stage) {
  const RegionBoxes of(g, item);
  for (int in_stage = static_cast<int>(threadIdx.x) / 32; in_stage < kRegionTokens; in_stage += K::warps) {
    const int64_t token = (item.first_step + step) * kRegionTokens + in_stage;
    const bool there = token < g.n;
    const int64_t at = there ? token : 0;
    load_region_row(stage, in_stage, static_cast<const uint16_t*>(g.dy) + at * g.dy_stride + of.output, of.outputs,
                    there ? of.outputs : 0);
    load_region_row(stage + static_cast<uint32_t>(g.dy_boxes * kRegionBoxBytes), in_stage,
                    static_cast<const uint16_t*>(g.x) + at * g.x_stride + of.input, of.inputs, there ? of.inputs : 0);
  }
}

struct RegionMaps {
  CUtensorMap x, dy;
};

// One warp, a lane a box.
__device__ inline void load_region_boxes(const RegionGradient& g, const RegionMaps& maps, const RegionBoxes& of,
                                         int token, uint32_t stage, uint32_t full) {
  const auto lane = static_cast<int>(threadIdx.x) % 32, box = lane - of.dy_boxes;
  if (lane == 0) {
    ptx::mbarrier_arrive_expect(full, static_cast<uint32_t>((of.dy_boxes + of.x_boxes) * kRegionBoxBytes));
  }
  __syncwarp();
  if (box < 0) {
    ptx::load_box(stage + static_cast<uint32_t>(lane * kRegionBoxBytes), &maps.dy, full,
                  static_cast<int>(of.output) + 64 * lane, token);
  } else if (box < of.x_boxes) {
    ptx::load_box(stage + static_cast<uint32_t>((g.dy_boxes + box) * kRegionBoxBytes), &maps.x, full,
                  static_cast<int>(of.input) + 64 * box, token);
  }
}

}  // namespace
}  // namespace blocksparse::gemm
