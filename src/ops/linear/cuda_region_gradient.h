// dW[i] = gate_i dy_out^T x_in for many tokens and small blocks: a thread block holds all blocks of a region of dW in
// registers, and walks the tokens once.
//   x [n, inputs]   dy [n, outputs]   dW [blocks, b, b]   16-bit elements, sums in f32
// Who does what
//   tables    a kernel in front cuts strips of outputs into units of about as many blocks: cuda_region_units.cu
//   grid      a thread block for each unit and slice of the tokens, one an SM
//   load      16 tokens of the unit's x and dy, three stages ahead: by a warp of its own in boxes (sm_90a), or by all
//             threads with cp.async, whose copies and products then wait for each other
//   compute   each warp has some of the blocks, in the order of rows, so that dy of a row is read once: mma.sync
//             b = 16, 32: outputs are its rows, inputs its columns. b = 8: two blocks' inputs are its rows
//   finish    registers to dW; slices go to the workspace, and a last kernel adds them, and gates' gradients
// wgmma would need cells of 64 outputs or inputs, of which a random pattern leaves most empty. Here no product is
// wasted, and shared memory is the limit: 4 to 5 reads of 128 bytes a block of 16 x 16 and 16 tokens, where tensor
// cores take 3.
#pragma once

#include "cuda/launch.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/tensor_map.h"
#include "cuda/tile.h"
#include "ops/linear/cuda_gradient_target.h"
#include "ops/linear/cuda_region_units.h"

namespace blocksparse::linear {
namespace {

constexpr int kRegionThreads = 32 * kRegionWarps;

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
  int32_t dy_boxes, boxes;  // of a stage
  float* partial;           // [slices][blocks, b, b]; null: straight to dW
  int64_t values;           // of dW
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
  static constexpr int cell = Cell, cells = region_form_of(Cell).cells_of_warp;
  static constexpr int sums = Cell == 32 ? 32 : Cell == 16 ? 8 : 4;  // of a lane, for each cell
  // Cells of which x is loaded while as many in front of them are multiplied.
  static constexpr int together = Cell == 32 ? 1 : 2;
  static_assert(cells % together == 0 && cells <= 64);
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

// What a warp has of a unit in one pass over the tokens.
template <class K>
struct RegionCells {
  int first, count;
  uint32_t offset[K::cells];  // in a stage, of this lane's part: of x in the low half, of dy in the high half
  uint64_t new_rows = 0;      // cells whose dy is not that of the cell in front

  __device__ RegionCells(const RegionGradient& g, const RegionItem& item, int pass_first) {
    const int all = cells_of_unit<K>(g, item.unit), of_pass = min(all - pass_first, K::cells * kRegionWarps);
    const int chunk = (of_pass + kRegionWarps - 1) / kRegionWarps, lane = static_cast<int>(threadIdx.x) % 32;
    first = pass_first + min(static_cast<int>(threadIdx.x) / 32 * chunk, of_pass);
    count = min(chunk, pass_first + of_pass - first);
    const RegionEntry* entries = g.tables.entries + item.unit.first_entry;
    // Of the four matrices of 8 x 8 that a warp loads at once, a left operand has the second side second, a right one
    // third.
    const int x_side = K::cell == 8 ? 0 : lane / 16, dy_side = K::cell == 8 ? 0 : lane / 8 % 2;
    int before = -1;
#pragma unroll
    for (int j = 0; j < K::cells; ++j) {
      offset[j] = 0;
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
      offset[j] = in_stage(column + x_side) | in_stage(row + dy_side) << 16;
      if (row != before) new_rows |= uint64_t{1} << j;
      before = row;
    }
  }

 private:
  // Where the 8 features are, from the first of dy or x on, in a row whose token is lane % 8 or 8 more.
  __device__ static uint32_t in_stage(int vector) {
    return static_cast<uint32_t>(vector / 8 * kRegionBoxBytes + (vector ^ static_cast<int>(threadIdx.x)) % 8 * 16);
  }
};

// ---- Load -----------------------------------------------------------------------------------------------------------

// What a stage holds of a unit.
struct RegionBoxes {
  int64_t output, input;  // the first
  int outputs, inputs;    // in the matrix
  int dy_boxes, x_boxes;

  __device__ RegionBoxes(const RegionGradient& g, const RegionItem& item) {
    output = int64_t{item.strip} * g.strip_rows << g.block_shift;
    input = int64_t{item.unit.first_column} << g.block_shift;
    outputs = static_cast<int>(min(int64_t{g.strip_rows} << g.block_shift, g.outputs - output));
    inputs = static_cast<int>(min(int64_t{item.unit.columns} << g.block_shift, g.inputs - input));
    dy_boxes = region_boxes(outputs);
    x_boxes = region_boxes(inputs);
  }
};

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

__device__ inline void load_region(const RegionGradient& g, const RegionItem& item, int64_t step, uint32_t stage) {
  const RegionBoxes of(g, item);
#pragma unroll
  for (int i = 0; i < kRegionTokens / kRegionWarps; ++i) {
    const int in_stage = static_cast<int>(threadIdx.x) / 32 + i * kRegionWarps;
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

// ---- Compute --------------------------------------------------------------------------------------------------------

// Tokens are rows in shared memory and the depth of the product, so all fragments are transposed as they are loaded.
template <class K>
__device__ inline void multiply_region(const RegionGradient& g, const RegionCells<K>& cells, uint32_t stage,
                                       float (&sum)[K::cells][K::sums]) {
  using T = typename K::T;
  constexpr bool kPairs = K::cell == 8;
  constexpr int kParts = kPairs ? 1 : K::cell / 16, kAhead = K::together;  // parts of 16 outputs, of 16 inputs
  const uint32_t lane = threadIdx.x % 32, left = lane % 8 + lane / 16 * 8, right = lane % 16;  // tokens
  const uint32_t x = stage + static_cast<uint32_t>(g.dy_boxes * kRegionBoxBytes) + (kPairs ? left : right) * 128;
  const uint32_t dy = stage + (kPairs ? right : left) * 128;
  uint32_t of_x[2][kAhead][kParts][4], of_dy[kParts][4] = {};
  const auto load_x = [&](int group) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
        const uint32_t offset = cells.offset[group * kAhead + i] & 0xffff;
        ptx::ldmatrix_x4_trans_at(of_x[group % 2][i][k], (x + offset) ^ (32 * k));
      }
    }
  };
  load_x(0);
#pragma unroll
  for (int group = 0; group < K::cells / kAhead; ++group) {
    if (group * kAhead >= cells.count) return;
    if (group + 1 < K::cells / kAhead) load_x(group + 1);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int j = group * kAhead + i;
      const bool is_new = (cells.new_rows >> j & 1) != 0;
      if constexpr (kPairs) {
        uint32_t(&b)[2] = reinterpret_cast<uint32_t(&)[2]>(of_dy[0]);
        ptx::ldmatrix_x2_trans_if(b, dy + (cells.offset[j] >> 16), is_new);
        ptx::mma_m16n8k16(sum[j], of_x[group % 2][i][0], b, T{});
      } else {
#pragma unroll
        for (int m = 0; m < kParts; ++m) {
          ptx::ldmatrix_x4_trans_if(of_dy[m], (dy + (cells.offset[j] >> 16)) ^ (32 * m), is_new);
        }
#pragma unroll
        for (int m = 0; m < kParts; ++m) {
#pragma unroll
          for (int k = 0; k < 2 * kParts; ++k) {
            const uint32_t* from = of_x[group % 2][i][k / 2] + k % 2 * 2;
            const uint32_t b[2] = {from[0], from[1]};
            ptx::mma_m16n8k16(reinterpret_cast<float(&)[4]>(sum[j][(m * 2 * kParts + k) * 4]), of_dy[m], b, T{});
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

// The items of a thread block, in turn.
class RegionWork {
 public:
  // All threads.
  __device__ RegionWork(const RegionGradient& g, int32_t* counts, int32_t* before) : g_(g), before_(before) {
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < g.strips) counts[thread] = g.tables.counts[thread];
    __syncthreads();
    if (thread <= g.strips) {
      int sum = 0;
      for (int s = 0; s < thread; ++s) sum += counts[s];
      before[thread] = sum;
    }
    __syncthreads();
    units_ = before[g.strips];
    next_ = static_cast<int>(blockIdx.x);
  }

  __device__ bool next(RegionItem& item) {
    if (next_ >= units_ * g_.slices) return false;
    const int unit = next_ % units_;
    item.slice = next_ / units_;
    item.strip = 0;
    while (unit >= before_[item.strip + 1]) ++item.strip;
    item.unit = g_.tables.units[item.strip * kMostStripUnits + unit - before_[item.strip]];
    item.first_step = static_cast<int32_t>(int64_t{g_.steps} * item.slice / g_.slices);
    item.last_step = static_cast<int32_t>(int64_t{g_.steps} * (item.slice + 1) / g_.slices);
    next_ += static_cast<int>(gridDim.x);
    return true;
  }

 private:
  const RegionGradient& g_;
  const int32_t* before_;
  int units_, next_;
};

struct RegionShared {
  int32_t counts[kMostRegionStrips], before[kMostRegionStrips + 1];
  uint64_t full[kRegionStages], empty[kRegionStages];
};

template <class K>
__global__ void __launch_bounds__(kRegionThreads, 1) region_gradient(const __grid_constant__ RegionGradient g) {
  extern __shared__ __align__(1024) char stages[];
  __shared__ RegionShared shared;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const uint32_t begin = ptx::shared_address(stages);
  const auto at = [&](int stage) { return begin + static_cast<uint32_t>(stage * g.boxes * kRegionBoxBytes); };
  RegionItem item{};
  for (RegionWork work(g, shared.counts, shared.before); work.next(item);) {
    for (int first = 0; first < cells_of_unit<K>(g, item.unit); first += K::cells * kRegionWarps) {
      const RegionCells<K> cells(g, item, first);
      float sum[K::cells][K::sums] = {};
      cuda::pipeline<kRegionStages>(
          item.last_step - item.first_step, [&](int64_t step, int stage) { load_region(g, item, step, at(stage)); },
          [&](int stage) { multiply_region<K>(g, cells, at(stage), sum); });
      store_region<K>(g, item, cells, sum);
    }
  }
}

// The same with a warp that loads in boxes.
template <class K>
__global__ void __launch_bounds__(kRegionThreads + 128, 1)
    region_gradient_in_boxes([[maybe_unused]] const __grid_constant__ RegionMaps maps,
                             [[maybe_unused]] const __grid_constant__ RegionGradient g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char stages[];
  __shared__ RegionShared shared;
  const uint32_t begin = ptx::shared_address(stages);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kRegionStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(shared.full + s), 1);
      ptx::mbarrier_init(ptx::shared_address(shared.empty + s), kRegionWarps);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  RegionWork work(g, shared.counts, shared.before);
  const auto at = [&](int stage) { return begin + static_cast<uint32_t>(stage * g.boxes * kRegionBoxBytes); };
  RegionItem item{};
  int stage = 0;
  uint32_t phase = 0;
  const auto advance = [&] {
    if (++stage == kRegionStages) stage = 0, phase ^= 1;
  };
  if (threadIdx.x >= kRegionThreads) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x >= kRegionThreads + 32) return;
    while (work.next(item)) {
      const RegionBoxes of(g, item);
      for (int first = 0; first < cells_of_unit<K>(g, item.unit); first += K::cells * kRegionWarps) {
        for (int step = item.first_step; step < item.last_step; ++step) {
          ptx::mbarrier_wait(ptx::shared_address(shared.empty + stage), phase ^ 1);
          load_region_boxes(g, maps, of, step * kRegionTokens, at(stage), ptx::shared_address(shared.full + stage));
          advance();
        }
      }
    }
    return;
  }
  ptx::setmaxnreg_inc<232>();
  while (work.next(item)) {
    for (int first = 0; first < cells_of_unit<K>(g, item.unit); first += K::cells * kRegionWarps) {
      const RegionCells<K> cells(g, item, first);
      float sum[K::cells][K::sums] = {};
      for (int step = item.first_step; step < item.last_step; ++step) {
        ptx::mbarrier_wait(ptx::shared_address(shared.full + stage), phase);
        multiply_region<K>(g, cells, at(stage), sum);
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(shared.empty + stage));
        advance();
      }
      store_region<K>(g, item, cells, sum);
    }
  }
#endif
}

// Slices in their order, and <S, W>: a warp a block.
template <class T>
__global__ void __launch_bounds__(256) region_combine(const __grid_constant__ RegionGradient g) {
  ptx::griddepcontrol_wait();
  const int lane = static_cast<int>(threadIdx.x) % 32, area = g.block * g.block;
  for (auto id = static_cast<int32_t>((blockIdx.x * 256 + threadIdx.x) / 32); id < g.blocks;
       id += static_cast<int32_t>(gridDim.x * 8)) {
    const int64_t output = int64_t{g.out_of[id]} * g.block, input = int64_t{g.refs[id].from} * g.block;
    float product = 0;
    for (int e = 2 * lane; e < area; e += 64) {
      const int64_t at = int64_t{id} * area + e;
      float2 sum = *reinterpret_cast<const float2*>(g.partial + at);
      for (int s = 1; s < g.slices; ++s) {
        const float2 more = *reinterpret_cast<const float2*>(g.partial + s * g.values + at);
        sum.x += more.x, sum.y += more.y;
      }
      const int64_t left = g.inputs - input - e % g.block;
      const int inside =
          output + e / g.block < g.outputs ? static_cast<int>(min(max(left, int64_t{0}), int64_t{2})) : 0;
      g.target.store_pair<T>(id, at, inside, sum);
      if (g.dgates != nullptr) product += gate_product<T>(g.w, at, inside, sum);
    }
    if (g.dgates == nullptr) continue;
    product = sum_of_warp(product);
    if (lane == 0) g.dgates[id] = (g.target.accumulate ? g.dgates[id] : 0) + product;
  }
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

// body.template operator()<K>() with the kernel type K.
template <class T, class Body>
Status with_region_kernel(int32_t block, Body body) {
  switch (block) {
    case 8: return body.template operator()<RegionKernel<T, 8>>();
    case 16: return body.template operator()<RegionKernel<T, 16>>();
    default: return body.template operator()<RegionKernel<T, 32>>();
  }
}

inline Status region_map(const Activations& a, CUtensorMap& map) {
  return cuda::make_tensor_map({.data = a.data,
                                .columns = a.features,
                                .rows = a.n,
                                .row_stride = a.token_stride,
                                .box_columns = 64,
                                .box_rows = kRegionTokens},
                               map);
}

template <class T>
Status launch_regions(const WeightGradient& g, const CudaCall& call) {
  const CudaProblem& p = call.problem;
  const GradTerm term = g.term(0);
  const RegionPlan plan = plan_regions(p, call.card);
  const RegionTables tables = region_tables(p, call.workspace.data);
  const auto walk = walk_on_device(g.layout, false);
  const bool partial = plan.slices > 1 || g.dgates != nullptr, overlap = call.card.sm90a;
  const RegionGradient args{.tables = tables,
                            .target = target_of(g),
                            .x = term.x.data,
                            .dy = term.dy.data,
                            .x_stride = term.x.token_stride,
                            .dy_stride = term.dy.token_stride,
                            .n = term.x.n,
                            .inputs = p.inputs,
                            .outputs = p.outputs,
                            .block = p.block,
                            .block_shift = __builtin_ctz(static_cast<unsigned>(p.block)),
                            .wide_shift = p.block > 32 ? __builtin_ctz(static_cast<unsigned>(p.block)) - 5 : 0,
                            .strips = plan.strips,
                            .strip_rows = plan.strip_rows,
                            .slices = plan.slices,
                            .steps = static_cast<int32_t>((p.n + kRegionTokens - 1) / kRegionTokens),
                            .dy_boxes = region_boxes(plan.strip_rows * p.block),
                            .boxes = plan.boxes,
                            .partial = partial ? tables.partial : nullptr,
                            .values = p.blocks * p.block * p.block,
                            .refs = walk.refs,
                            .out_of = out_of_on_device(g.layout),
                            .w = g.w,
                            .dgates = static_cast<float*>(g.dgates),
                            .blocks = static_cast<int32_t>(p.blocks)};
  RegionMaps maps{};
  if (call.card.sm90a) {
    BS_RETURN_IF_ERROR(region_map(term.x, maps.x));
    BS_RETURN_IF_ERROR(region_map(term.dy, maps.dy));
  }
  BS_RETURN_IF_ERROR(make_region_units(call, plan, walk, tables));
  BS_RETURN_IF_ERROR(with_region_kernel<T>(p.block, [&]<class K>() {
    cuda::Launch how{.blocks = call.card.multiprocessors,
                     .threads = kRegionThreads,
                     .shared_bytes = kRegionStages * plan.boxes * kRegionBoxBytes,
                     .stream = stream_of(call),
                     .overlap = overlap};
    if (!call.card.sm90a) return cuda::launch(how, region_gradient<K>, args);
    how.threads += 128;
    return cuda::launch(how, region_gradient_in_boxes<K>, maps, args);
  }));
  if (!partial) return {};
  return cuda::launch({.blocks = std::clamp<int64_t>(p.blocks / 8, 1, int64_t{16} * call.card.multiprocessors),
                       .threads = 256,
                       .stream = stream_of(call),
                       .overlap = overlap},
                      region_combine<T>, args);
}

template <class T>
Status prepare_regions() {
  int device = 0, most = 0, major = 0;
  const auto ask = [&device](int& value, cudaDeviceAttr what) {
    return cuda::status_of(cudaDeviceGetAttribute(&value, what, device), "cudaDeviceGetAttribute");
  };
  BS_RETURN_IF_ERROR(cuda::status_of(cudaGetDevice(&device), "cudaGetDevice"));
  BS_RETURN_IF_ERROR(ask(most, cudaDevAttrMaxSharedMemoryPerBlockOptin));
  BS_RETURN_IF_ERROR(ask(major, cudaDevAttrComputeCapabilityMajor));
  const int bytes = most - 2048;  // the rest is not dynamic
  for (int32_t block : {8, 16, 32}) {
    BS_RETURN_IF_ERROR(with_region_kernel<T>(block, [&]<class K>() {
      if (major >= 9) BS_RETURN_IF_ERROR(cuda::prepare(region_gradient_in_boxes<K>, bytes));
      return cuda::prepare(region_gradient<K>, bytes);
    }));
  }
  BS_RETURN_IF_ERROR(cuda::prepare(region_combine<T>, 0));
  if (major >= 9) BS_RETURN_IF_ERROR(cuda::prepare_tensor_maps());
  return prepare_region_units();
}

template <class T>
CudaGradientKernel make_regions_gradient(DType dtype) {
  return {CudaKernel::regions, dtype, prepare_regions<T>, launch_regions<T>};
}

}  // namespace
}  // namespace blocksparse::linear
