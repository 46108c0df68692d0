#include "ops/linear/cuda_many_units.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"

namespace blocksparse::linear {
namespace {

constexpr int kThreads = 256;
static_assert(kThreads > kMostGradientGrid);
constexpr int kMostStripRows = 8;  // of blocks

struct GradientCells {
  DeviceWalk walk;
  GradientTables to;
  int32_t block_shift;
  int32_t rows, strip_rows, chunks;
  int32_t cell_shift;  // inputs of a cell
  int32_t id_columns;  // blocks of a cell beside each other; 0: a block has several cells
  int32_t ids;         // of a cell

  __device__ int cells_of_block() const { return id_columns == 0 ? 2 : 1; }
  // The first cell of a strip whose first block that is: there is room for as many as the strips in front may have.
  __device__ int first_cell(int strip, int first_block) const {
    return static_cast<int>(min(int64_t{strip} * chunks, int64_t{first_block} * cells_of_block()));
  }
};

struct GradientUnits {
  GradientTables to;
  int32_t strips;
  ManyGradientForm form;
  int32_t grid, steps;
};

// Sum of `value` over the threads in front, and over all; `of_warp` holds one entry a warp.
__device__ int2 before_and_all(int value, int32_t* of_warp) {
  const auto thread = static_cast<int>(threadIdx.x);
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (thread % 32 >= step) sum += other;
  }
  __syncthreads();
  if (thread % 32 == 31) of_warp[thread / 32] = sum;
  __syncthreads();
  int before = sum - value, all = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    if (warp < thread / 32) before += of_warp[warp];
    all += of_warp[warp];
  }
  return {before, all};
}

// The cells of a strip: which chunks of inputs they are, and which blocks they hold.
__device__ void make_cells(const GradientCells& p, int strip, int32_t* of_warp) {
  __shared__ int32_t row_start[kMostStripRows + 1];
  __shared__ int32_t cell_of[kMostGradientChunks];
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread <= p.strip_rows) row_start[thread] = p.walk.starts[min(strip * p.strip_rows + thread, p.rows)];
  for (int c = thread; c < p.chunks; c += kThreads) cell_of[c] = 0;
  __syncthreads();
  const int begin = row_start[0], end = row_start[p.strip_rows];
  const int cells_of_block = p.cells_of_block();
  const auto chunk_of = [&](int from) {
    return p.id_columns == 0 ? 2 * from
                             : static_cast<int>((static_cast<int64_t>(from) << p.block_shift) >> p.cell_shift);
  };
  for (int i = begin + thread; i < end; i += kThreads) {
    for (int half = 0; half < cells_of_block; ++half) cell_of[chunk_of(p.walk.refs[i].from) + half] = 1;
  }
  __syncthreads();
  const int each = (p.chunks + kThreads - 1) / kThreads;
  const int first = min(thread * each, p.chunks), last = min(first + each, p.chunks);
  int mine = 0;
  for (int c = first; c < last; ++c) mine += cell_of[c];
  const int2 count = before_and_all(mine, of_warp);
  const int base = p.first_cell(strip, begin);
  for (int c = first, cell = base + count.x; c < last; ++c) {
    if (cell_of[c] == 0) continue;
    cell_of[c] = cell;
    p.to.chunks[cell++] = c;
  }
  if (thread == 0) p.to.counts[strip] = {base, count.y};
  if (p.ids > 1) {
    for (int64_t i = thread; i < int64_t{count.y} * p.ids; i += kThreads) p.to.ids[int64_t{base} * p.ids + i] = -1;
  }
  __syncthreads();
  for (int i = begin + thread; i < end; i += kThreads) {
    const BlockRef ref = p.walk.refs[i];
    int row = 0;
    while (row + 1 < p.strip_rows && i >= row_start[row + 1]) ++row;
    for (int half = 0; half < cells_of_block; ++half) {
      const int64_t cell = cell_of[chunk_of(ref.from) + half];
      const int id = p.ids == 1 ? 0 : row * p.id_columns + ref.from % p.id_columns;
      p.to.ids[cell * p.ids + id] = ref.weight;
    }
  }
}

// Cells to units, as equal as they come, in the order of strips: so neighbours have their dy in common. One thread
// block. Those beyond the last whole round of the grid are shared by all thread blocks, in equal parts of their cost.
// cells_of(strip): the first, and how many.
template <class CellsOf>
__device__ void make_units(const GradientUnits& p, int32_t* of_warp, CellsOf cells_of) {
  __shared__ int32_t cost_before[kMostGradientGrid + 1];
  const auto thread = static_cast<int>(threadIdx.x);
  int units = 0;
  for (int first = 0; first < p.strips; first += kThreads) {
    const int strip = first + thread;
    const int2 cells = strip < p.strips ? cells_of(strip) : int2{0, 0};
    const int parts = (cells.y + p.form.most_cells - 1) / p.form.most_cells;
    const int2 count = before_and_all(parts, of_warp);
    for (int part = 0; part < parts; ++part) {
      const int from = cells.y * part / parts, to = cells.y * (part + 1) / parts;
      p.to.units[units + count.x + part] = {strip, cells.x + from, to - from, 0};
    }
    units += count.y;
  }
  __syncthreads();
  const int rest = units % p.grid, whole = 5 * rest >= 4 * p.grid ? units : units - rest, shared = units - whole;
  const int cost = thread < shared ? p.form.cost_of(p.to.units[whole + thread].cells) : 0;
  const int2 sum = before_and_all(cost, of_warp);
  if (thread <= shared) cost_before[thread] = sum.x;
  __syncthreads();
  if (thread == 0) p.to.shares[0] = {units, whole};
  if (thread > p.grid) return;
  // In cost times steps: units of cost alone are too coarse where there are few (4 units of 5, 132 thread blocks: 20
  // had work, and a gradient of 256 x 256 of 50,000 tokens took 110 us).
  const int64_t at = int64_t{sum.y} * p.steps * thread / p.grid;
  int unit = 0;
  for (int jump = 128; jump > 0; jump /= 2) {
    if (unit + jump <= shared && int64_t{cost_before[unit + jump]} * p.steps <= at) unit += jump;
  }
  int step = 0;
  if (unit < shared) {
    const int64_t inner = at - int64_t{cost_before[unit]} * p.steps;
    step = static_cast<int>(inner / (cost_before[unit + 1] - cost_before[unit]));
  }
  p.to.shares[1 + thread] = {whole + unit, step};
}

// A thread block a strip. Beside: one more, which makes the units. Where a strip is a row of blocks, it need not wait
// for the cells to be counted: 4 us less, of 73 and 111 (b = 128, 64; .25, 4096 x 4096, n 4096).
template <bool Beside>
__global__ void __launch_bounds__(kThreads)
    gradient_cells(const __grid_constant__ GradientCells p, const __grid_constant__ GradientUnits units) {
  __shared__ int32_t of_warp[kThreads / 32];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const auto strip = static_cast<int>(blockIdx.x);
  if (!Beside || strip < units.strips) {
    make_cells(p, strip, of_warp);
    return;
  }
  make_units(units, of_warp, [&p](int row) {
    const int begin = p.walk.starts[row], end = p.walk.starts[row + 1];
    return int2{p.first_cell(row, begin), (end - begin) * p.cells_of_block()};
  });
}

__global__ void __launch_bounds__(kThreads) gradient_units(const __grid_constant__ GradientUnits p) {
  __shared__ int32_t of_warp[kThreads / 32];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  make_units(p, of_warp, [&p](int strip) { return p.to.counts[strip]; });
}

}  // namespace

Status make_gradient_units(const CudaCall& call, const ManyGradientForm& form, const DeviceWalk& walk,
                           const GradientTables& to, int32_t grid, int32_t steps) {
  const CudaProblem& p = call.problem;
  const ManyGradientPlan plan = plan_gradient(p, form);
  const auto log2_of = [](int32_t value) { return __builtin_ctz(static_cast<unsigned>(value)); };
  const GradientCells cells{.walk = walk,
                            .to = to,
                            .block_shift = log2_of(p.block),
                            .rows = static_cast<int32_t>(p.output_blocks()),
                            .strip_rows = std::max(1, form.strip_outputs / p.block),
                            .chunks = static_cast<int32_t>(plan.chunks),
                            .cell_shift = log2_of(form.cell_inputs),
                            .id_columns = form.cell_inputs / p.block,
                            .ids = form.ids};
  const GradientUnits units{
      .to = to, .strips = static_cast<int32_t>(plan.strips), .form = form, .grid = grid, .steps = steps};
  const auto stream = static_cast<cudaStream_t>(call.stream);
  if (cells.strip_rows == 1 && form.ids == 1) {
    return cuda::launch({.blocks = plan.strips + 1, .threads = kThreads, .stream = stream, .overlap = true},
                        gradient_cells<true>, cells, units);
  }
  BS_RETURN_IF_ERROR(cuda::launch({.blocks = plan.strips, .threads = kThreads, .stream = stream, .overlap = true},
                                  gradient_cells<false>, cells, units));
  return cuda::launch({.threads = kThreads, .stream = stream, .overlap = true}, gradient_units, units);
}

Status prepare_gradient_units() {
  BS_RETURN_IF_ERROR(cuda::prepare(gradient_cells<true>, 0));
  BS_RETURN_IF_ERROR(cuda::prepare(gradient_cells<false>, 0));
  return cuda::prepare(gradient_units, 0);
}

}  // namespace blocksparse::linear
