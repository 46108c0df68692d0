// What a thread block of the kernel `wgrad_in_registers` holds of dW, and how a stage of tokens reaches shared memory.
#pragma once

#include "core/ceil_div.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/tensor_map.h"
#include "gemm/cuda/gradient_target.cuh"
#include "gemm/cuda/wgrad_in_registers/jobs.h"

namespace blocksparse::gemm::wgrad_in_registers {
namespace {

struct Args {
  Tables tables;
  GradientTarget target;
  const void *x, *dy;
  int64_t x_stride, dy_stride;
  int64_t n, inputs, outputs;
  int32_t block, block_shift;
  int32_t wide_shift;  // patches of a block beside each other
  int32_t strips, strip_rows;
  int32_t slices, steps;
  int32_t stages, dy_boxes, boxes;  // boxes of a stage
  float* partial;                   // [slices][blocks, b, b]; null: straight to dW
  int64_t values;                   // of dW
  // For the last kernel:
  const BlockRef* refs;
  const int32_t* out_of;
  const void* w;
  float* dgates;
  int32_t blocks;
};

template <class E, int Patch>
struct Kernel {
  using T = E;
  static constexpr int patch = Patch, warps = form_of(Patch).warps, patches = form_of(Patch).patches_of_warp;
  static constexpr int threads = 32 * warps, patches_of_pass = warps * patches;
  static constexpr int sums = Patch == 32 ? 32 : Patch == 16 ? 8 : 4;  // of a lane, for each patch
  static constexpr int ahead = Patch == 8 ? 2 : 1;                     // patches of which x is under way
  // The kernel asks after so many patches whether there are more. The question waits for all products so far; what lies
  // beyond the last patch is multiplied for nothing.
  static constexpr int together = Patch == 8 ? 2 : 1;
  static constexpr int registers = warps == 8 ? 240 : 160, load_registers = 24;
  static_assert(patches <= 64);
};

// An item of work: a job and a slice of the tokens.
struct Item {
  Job job;
  int32_t strip, slice;
  int32_t first_step, last_step;
};

template <class K>
__device__ inline int patches_of_job(const Args& g, const Job& job) {
  return K::patch == 8 ? job.entries / 2 : job.entries << 2 * g.wide_shift;
}

// The patches of a block follow each other, row by row.
__device__ inline int entry_of(const Args& g, int patch) { return patch >> 2 * g.wide_shift; }

struct PatchInBlock {
  int row, column;
  __device__ PatchInBlock(const Args& g, int patch) {
    const int wide = 1 << g.wide_shift;
    row = patch >> g.wide_shift & (wide - 1);
    column = patch & (wide - 1);
  }
};

// The boxes of a stage that a job needs.
struct Boxes {
  int64_t output, input;  // the first: of a box, or some rows would be of two lines, which come at half the rate
  int outputs, inputs;    // in the matrix
  int dy_boxes, x_boxes;

  // The job's own first feature, which may lie within the first box.
  __device__ static int64_t first_output(const Args& g, const Item& item) {
    return int64_t{item.strip} * g.strip_rows << g.block_shift;
  }
  __device__ static int64_t first_input(const Args& g, const Item& item) {
    return int64_t{item.job.first_column} << g.block_shift;
  }

  __device__ Boxes(const Args& g, const Item& item) {
    const int64_t own_output = first_output(g, item), own_input = first_input(g, item);
    output = own_output & ~int64_t{63}, input = own_input & ~int64_t{63};
    outputs = static_cast<int>(min(own_output + (int64_t{g.strip_rows} << g.block_shift), g.outputs) - output);
    inputs = static_cast<int>(min(own_input + (int64_t{item.job.columns} << g.block_shift), g.inputs) - input);
    dy_boxes = ceil_div(outputs, 64);
    x_boxes = ceil_div(inputs, 64);
  }
};

// The patches that a warp has of a job in one pass over the tokens.
template <class K>
struct Patches {
  int first, count;
  uint32_t
      offset[K::patches];     // in a stage, of this lane's part, in 16 bytes: of x in bits 16 and up, of dy in 12 bits
  uint32_t new_rows[2] = {};  // a bit for each patch whose dy is not that of the patch in front

  // One shift gives bytes, because bits 12 to 15 are 0; the compiler joins it with the addition that follows.
  __device__ uint32_t x_offset(int j) const { return offset[j] >> 12; }
  __device__ uint32_t dy_offset(int j) const { return offset[j] % 4096 * 16; }
  __device__ uint32_t is_new_row(int j) const { return new_rows[j / 32] & 1u << j % 32; }

  __device__ Patches(const Args& g, const Item& item, int pass_first) {
    const int all = patches_of_job<K>(g, item.job), of_pass = min(all - pass_first, K::patches_of_pass);
    const int chunk = ceil_div(of_pass, K::warps), lane = static_cast<int>(threadIdx.x) % 32;
    first = pass_first + min(static_cast<int>(threadIdx.x) / 32 * chunk, of_pass);
    count = min(chunk, pass_first + of_pass - first);
    const Entry* entries = g.tables.entries + item.job.first_entry;
    // A warp loads four matrices of 8 x 8 at once. The next 8 features are the second matrix of a left operand, and the
    // third of a right operand.
    const int x_side = (K::patch == 8 ? 0 : lane / 16) + static_cast<int>(Boxes::first_input(g, item) % 64 / 8);
    const int dy_side = (K::patch == 8 ? 0 : lane / 8 % 2) + static_cast<int>(Boxes::first_output(g, item) % 64 / 8);
    int before = -1;
#pragma unroll
    for (int j = 0; j < K::patches; ++j) {
      offset[j] = in_stage(0) << 16 | in_stage(0);  // also where there is no patch: 0 would be one bank for all lanes
      if (j >= count) continue;
      int row, column;
      if constexpr (K::patch == 8) {
        const Entry e = entries[2 * (first + j) + lane / 8 % 2];
        row = e.row, column = e.column;
      } else {
        const Entry e = entries[entry_of(g, first + j)];
        const PatchInBlock at(g, first + j);
        row = ((e.row << g.block_shift) + at.row * K::patch) / 8;
        column = ((e.column << g.block_shift) + at.column * K::patch) / 8;
      }
      offset[j] = in_stage(column + x_side) << 16 | in_stage(row + dy_side);
      if (row != before) new_rows[j / 32] |= 1u << j % 32;
      before = row;
    }
    // These are equal in all lanes, which the compiler does not see otherwise: it joined the warp at every patch.
    count = __shfl_sync(~0u, count, 0);
#pragma unroll
    for (uint32_t& rows : new_rows) rows = __shfl_sync(~0u, rows, 0);
  }

 private:
  // The place in a row of the stage, in 16 bytes, of 8 features: the `vector`-th 8 of dy or x. The row's token is lane
  // % 8 or a multiple of 8 more.
  __device__ static uint32_t in_stage(int vector) {
    return static_cast<uint32_t>(vector / 8 * (kBoxBytes / 16) + (vector ^ static_cast<int>(threadIdx.x)) % 8);
  }
};

// ---- Load -----------------------------------------------------------------------------------------------------------

// A warp copies a token's row of `features`, of which `inside` exist; the others become 0. Mostly all exist: that loop
// has five instructions, the other one 20.
__device__ inline void load_row(uint32_t boxes, int token, const uint16_t* row, int features, int inside) {
  const int lane = static_cast<int>(threadIdx.x) % 32, vectors = ceil_div(features, 8);
  uint32_t to = boxes + static_cast<uint32_t>(lane / 8 * kBoxBytes + token * 128 + (lane ^ token) % 8 * 16);
  row += 8 * lane;
  if (inside >= 8 * vectors) {
#pragma unroll 2
    for (int v = lane; v < vectors; v += 32, to += 4 * kBoxBytes, row += 256) ptx::cp_async_16_at(to, row, 16);
    return;
  }
#pragma unroll 1
  for (int v = lane; v < vectors; v += 32, to += 4 * kBoxBytes, row += 256) {
    const int bytes = 2 * min(max(inside - 8 * v, 0), 8);
    ptx::cp_async_16_at(to, bytes > 0 ? row : row - 8 * v, bytes);
  }
}

template <class K>
__device__ inline void load_rows(const Args& g, const Item& item, int64_t step, uint32_t stage) {
  const Boxes of(g, item);
  for (int in_stage = static_cast<int>(threadIdx.x) / 32; in_stage < kTokens; in_stage += K::warps) {
    const int64_t token = (item.first_step + step) * kTokens + in_stage;
    const bool there = token < g.n;
    const int64_t at = there ? token : 0;
    load_row(stage, in_stage, static_cast<const uint16_t*>(g.dy) + at * g.dy_stride + of.output, of.outputs,
             there ? of.outputs : 0);
    load_row(stage + static_cast<uint32_t>(g.dy_boxes * kBoxBytes), in_stage,
             static_cast<const uint16_t*>(g.x) + at * g.x_stride + of.input, of.inputs, there ? of.inputs : 0);
  }
}

struct Maps {
  CUtensorMap x, dy;
};

// One warp loads a stage, a lane a box.
__device__ inline void load_boxes(const Args& g, const Maps& maps, const Boxes& of, int token, uint32_t stage,
                                  uint32_t full) {
  const auto lane = static_cast<int>(threadIdx.x) % 32, box = lane - of.dy_boxes;
  if (lane == 0) {
    ptx::mbarrier_arrive_expect(full, static_cast<uint32_t>((of.dy_boxes + of.x_boxes) * kBoxBytes));
  }
  __syncwarp();
  if (box < 0) {
    ptx::load_box(stage + static_cast<uint32_t>(lane * kBoxBytes), &maps.dy, full,
                  static_cast<int>(of.output) + 64 * lane, token);
  } else if (box < of.x_boxes) {
    ptx::load_box(stage + static_cast<uint32_t>((g.dy_boxes + box) * kBoxBytes), &maps.x, full,
                  static_cast<int>(of.input) + 64 * box, token);
  }
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_in_registers
