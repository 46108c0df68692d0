#include "gemm/cuda/wgrad_wgmma/units.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"

namespace blocksparse::gemm {
namespace {

constexpr int kThreads = 256;
static_assert(kThreads > kMostGradientGrid);
constexpr int kMostStripRows = 16;  // of blocks

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

// How a strip's cells are made units: of 2^shift cells and one of the rest, of half of the cells where whole ones would
// leave thread blocks without work, or as equal as they come.
enum UnitSizes : int { kFull, kHalf, kEqual, kChoices };

struct GradientUnits {
  GradientTables to;
  int32_t strips;
  ManyGradientForm form;
  int32_t most_shift;  // of the form's cells
  int32_t grid, steps;

  __device__ int shift_of(int choice) const { return most_shift - (choice == kHalf); }
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
    auto* pairs = reinterpret_cast<int2*>(p.to.ids + int64_t{base} * p.ids);  // there are an even number of them
    for (int64_t i = thread; i < int64_t{count.y} * p.ids / 2; i += kThreads) pairs[i] = {-1, -1};
  }
  __syncthreads();
  for (int i = begin + thread; i < end; i += kThreads) {
    const BlockRef ref = p.walk.refs[i];
    int row = 0;
#pragma unroll
    for (int step = kMostStripRows / 2; step > 0; step /= 2) {
      if (row + step < p.strip_rows && i >= row_start[row + step]) row += step;
    }
    for (int half = 0; half < cells_of_block; ++half) {
      const int64_t cell = cell_of[chunk_of(ref.from) + half];
      const int id = p.ids == 1 ? 0 : row * p.id_columns + ref.from % p.id_columns;
      p.to.ids[cell * p.ids + id] = ref.weight;
    }
  }
}

// ---- Units ----------------------------------------------------------------------------------------------------------
// Short loops: instructions that run once have to be fetched, and all unrolled took 20 us more.

// of[k]: how many units have more than k cells; none has more than 16.
struct UnitCounts {
  int32_t of[32];

  // By a warp, from how many have just as many.
  __device__ void add_up() {
    const auto lane = static_cast<int>(threadIdx.x) % 32;
    int sum = of[lane];
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_down_sync(~0u, sum, step);
      if (lane + step < 32) sum += other;
    }
    of[lane] = sum;
    __syncwarp();
  }
  __device__ int all() const { return of[0]; }
  // Of a unit, if those of most cells come first.
  __device__ int cells_at(int unit) const {
    int cells = 0;
#pragma unroll 1
    for (int step = 16; step > 0; step /= 2) {
      if (of[cells + step - 1] > unit) cells += step;
    }
    return cells;
  }
};

struct UnitTime {
  float time;  // in cost times steps
  bool cut;    // those beyond the last whole round
};

// Where nearly all units of a round are cut, they are at tokens far apart, and x comes from DRAM: 4096 x 14336, b = 32,
// .1, 374 units for 132 thread blocks take 940 us so, 578 otherwise. All of one round take 1.5 to 1.8 times as long.
constexpr float kMostCutFactor = 1.6f;

// By a warp, whose lanes are 32 of the grid's thread blocks.
__device__ UnitTime time_of(const UnitCounts& counts, const GradientUnits& p) {
  const int lane = static_cast<int>(threadIdx.x) % 32, units = counts.all(), whole = units - units % p.grid;
  const int block = lane * (p.grid - 1) / 31;
  int of_rounds = 0, of_all = 0;
#pragma unroll 1
  for (int round = 0, unit = block; unit < units; unit = unit_in_turn(++round, block, p.grid)) {
    of_all += p.form.cost_of(counts.cells_at(unit));
    if (unit < whole) of_rounds = of_all;
  }
  const int cut_of_size = lane < 31 ? max(counts.of[lane] - max(counts.of[lane + 1], whole), 0) : 0;
  const int of_rest = __reduce_add_sync(~0u, cut_of_size * p.form.cost_of(lane + 1));
  of_rounds = __reduce_max_sync(~0u, of_rounds);
  of_all = __reduce_max_sync(~0u, of_all);
  const auto steps = static_cast<float>(p.steps), in_turn = static_cast<float>(of_all) * steps;
  const float factor = whole == 0 || 3 * (units - whole) > 2 * p.grid ? kMostCutFactor : 1;
  const float part = factor * static_cast<float>(of_rest) / static_cast<float>(p.grid);
  const float cut = (static_cast<float>(of_rounds) + part) * steps + static_cast<float>(p.form.combine_cost);
  return {min(in_turn, cut), whole < units && cut < in_turn};
}

struct UnitChoice {
  int index, shift;
  bool cut;
  int units;
};

// The one that takes the least time. All threads; cells_of(strip): the first, and how many.
template <class CellsOf>
__device__ UnitChoice choose_units(const GradientUnits& p, UnitCounts (&counts)[kChoices], CellsOf cells_of) {
  __shared__ UnitTime times[kChoices];
  const auto thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  if (thread < 32 * kChoices) counts[warp].of[thread % 32] = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < p.strips * kChoices; i += kThreads) {
    const int cells = cells_of(i / kChoices).y, choice = i % kChoices, shift = p.shift_of(choice);
    const int units = (cells + (1 << shift) - 1) >> shift, size = choice == kEqual ? cells / max(units, 1) : 1 << shift;
    // Others have one cell more, or what is left.
    const int others = choice == kEqual ? cells - size * units : units - (cells >> shift);
    const int of_others = choice == kEqual ? size + 1 : cells & ((1 << shift) - 1);
    if (units > others) atomicAdd(counts[choice].of + size - 1, units - others);
    if (others > 0) atomicAdd(counts[choice].of + of_others - 1, others);
  }
  __syncthreads();
  if (warp < kChoices) {
    counts[warp].add_up();
    const UnitTime time = time_of(counts[warp], p);
    if (thread % 32 == 0) times[warp] = time;
  }
  __syncthreads();
  // Where half of the cells were hardly better by this count, they were worse: 6144 x 6144, b = 64, .1: 152 and 181 us.
  int best = times[kHalf].time < 0.85f * times[kFull].time ? kHalf : kFull;
  // Not in the order of their cells, equal ones that are cut are not those of the least cells.
  const float equal = times[kEqual].cut ? 1.1f * times[kEqual].time : times[kEqual].time;
  if (equal < times[best].time) best = kEqual;
  return {best, p.shift_of(best), times[best].cut, counts[best].all()};
}

// The strips' last units, those of most cells first, of as many in the order of strips: how many come before this
// thread's, of `cells`; 0: it has none. All threads.
struct RestPlaces {
  int32_t of_warps[kThreads / 32][32];

  __device__ int before(int cells) {
    const auto lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const unsigned same = __match_any_sync(~0u, cells);
    const int before = __popc(same & ((1u << lane) - 1));
    of_warps[warp][lane] = 0;
    __syncwarp();
    if (before == 0) of_warps[warp][cells] = __popc(same);
    __syncthreads();
    int sum = before;
#pragma unroll 1
    for (int other = 0; other < warp; ++other) sum += of_warps[other][cells];
    return sum;
  }
  __device__ int all(int cells) const {
    int sum = 0;
#pragma unroll 1
    for (const auto& of_warp : of_warps) sum += of_warp[cells];
    return sum;
  }
};

// Cells to units: those of most cells first, of as many in the order of strips, so that neighbours have their dy in
// common; equal ones in that order alone.
template <class CellsOf>
__device__ UnitChoice list_units(const GradientUnits& p, int32_t* of_warp, CellsOf cells_of) {
  __shared__ UnitCounts counts[kChoices];
  __shared__ RestPlaces places;
  __shared__ int32_t rest_before[32];
  const auto thread = static_cast<int>(threadIdx.x);
  const UnitChoice choice = choose_units(p, counts, cells_of);
  const int shift = choice.shift;
  const bool equal = choice.index == kEqual;
  if (thread < 31) rest_before[thread] = counts[choice.index].of[thread];  // of more cells than that
  int units = 0;
#pragma unroll 1
  for (int first = 0; first < p.strips; first += kThreads) {
    const int strip = first + thread;
    const int2 cells = strip < p.strips ? cells_of(strip) : int2{0, 0};
    const int all = (cells.y + (1 << shift) - 1) >> shift, full = equal ? all : cells.y >> shift;
    const int2 before = before_and_all(full, of_warp);
#pragma unroll 1
    for (int i = 0; i < full; ++i) {
      const int from = equal ? cells.y * i / all : i << shift, to = equal ? cells.y * (i + 1) / all : (i + 1) << shift;
      p.to.units[units + before.x + i] = {strip, cells.x + from, to - from, 0};
    }
    units += before.y;
    if (equal) continue;
    const int rest = cells.y - (full << shift);
    const int at = rest_before[rest] + places.before(rest);
    if (rest > 0) p.to.units[at] = {strip, cells.x + cells.y - rest, rest, 0};
    __syncthreads();
    if (thread < 31) rest_before[thread] += places.all(thread);
    __syncthreads();
  }
  __syncthreads();
  return choice;
}

// One thread block. Units beyond the last whole round of the grid are taken in turn too, or, if that is over sooner,
// shared by all thread blocks in equal parts of their cost.
template <class CellsOf>
__device__ void make_units(const GradientUnits& p, int32_t* of_warp, CellsOf cells_of) {
  __shared__ int32_t cost_before[kMostGradientGrid + 1];
  const auto thread = static_cast<int>(threadIdx.x);
  const UnitChoice choice = list_units(p, of_warp, cells_of);
  const int shared = choice.cut ? choice.units % p.grid : 0, whole = choice.units - shared;
  const int cost = thread < shared ? p.form.cost_of(p.to.units[whole + thread].cells) : 0;
  const int2 sum = before_and_all(cost, of_warp);
  if (thread <= shared) cost_before[thread] = sum.x;
  __syncthreads();
  if (thread == 0) p.to.shares[0] = {choice.units, whole};
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
  const GradientUnits units{.to = to,
                            .strips = static_cast<int32_t>(plan.strips),
                            .form = form,
                            .most_shift = log2_of(form.most_cells),
                            .grid = grid,
                            .steps = steps};
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

}  // namespace blocksparse::gemm
