#include "ops/linear/cuda_region_units.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"

namespace blocksparse::linear {
namespace {

constexpr int kUnitThreads = 1024;
constexpr int kUnitWarps = kUnitThreads / 32;

struct RegionCut {
  DeviceWalk walk;
  RegionTables to;
  int32_t rows, columns;  // of blocks
  int32_t strip_rows, units, most_columns;
  int32_t in_pairs;  // entries of a row in a unit are made even: 1; not: 0
};

struct CutShared {
  int32_t row_start[kMostStripRows + 1];
  int32_t cut[kMostStripUnits + 1];  // first column of each unit
  int32_t units;
  int32_t of_warp[kUnitWarps];
};

// Sums of `count` values in shared memory in front of each; returns the sum of all. All threads.
__device__ int sums_before(int32_t* values, int count, int32_t* of_warp) {
  const auto thread = static_cast<int>(threadIdx.x);
  const int each = (count + kUnitThreads - 1) / kUnitThreads;
  const int first = min(thread * each, count), last = min(first + each, count);
  int mine = 0;
  for (int i = first; i < last; ++i) mine += values[i];
  int sum = mine;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (thread % 32 >= step) sum += other;
  }
  if (thread % 32 == 31) of_warp[thread / 32] = sum;
  __syncthreads();
  int before = sum - mine, all = 0;
  for (int warp = 0; warp < kUnitWarps; ++warp) {
    if (warp < thread / 32) before += of_warp[warp];
    all += of_warp[warp];
  }
  for (int i = first; i < last; ++i) {
    const int value = values[i];
    values[i] = before;
    before += value;
  }
  __syncthreads();
  return all;
}

// Equal shares of the strip's blocks, those that are too wide cut into equal widths.
__device__ void cut_strip(const RegionCut& p, CutShared& s, const int32_t* before, int all) {
  const auto thread = static_cast<int>(threadIdx.x);
  const int shares = min(p.units, max(1, all));
  const auto begin_of = [&](int share) {  // the first column in front of which there are share / shares of all blocks
    if (share == 0) return 0;
    if (share == shares) return p.columns;
    const auto wanted = static_cast<int>((int64_t{all} * share + shares - 1) / shares);
    int low = 0, high = p.columns;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (before[middle] < wanted) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  int begin = 0, width = 0, pieces = 0;
  if (thread < shares) {
    begin = begin_of(thread);
    width = begin_of(thread + 1) - begin;
    pieces = (width + p.most_columns - 1) / p.most_columns;
  }
  // At most 64 shares: of the first two warps.
  int sum = pieces;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (thread % 32 >= step) sum += other;
  }
  if (thread % 32 == 31) s.of_warp[thread / 32] = sum;
  __syncthreads();
  if (thread < kMostStripUnits) {
    const int first = sum - pieces + (thread >= 32 ? s.of_warp[0] : 0);
    for (int i = 0; i < pieces; ++i) {
      if (first + i < kMostStripUnits) s.cut[first + i] = begin + width * i / pieces;
    }
  }
  if (thread == 0) {
    s.units = min(s.of_warp[0] + s.of_warp[1], kMostStripUnits);
    s.cut[s.units] = p.columns;
  }
  __syncthreads();
}

__device__ int unit_of(const CutShared& s, int column) {
  int unit = 0;
#pragma unroll
  for (int step = kMostStripUnits / 2; step > 0; step /= 2) {
    if (unit + step < s.units && s.cut[unit + step] <= column) unit += step;
  }
  return unit;
}

__device__ int row_of(const CutShared& s, int rows, int ref) {
  int row = 0;
#pragma unroll
  for (int step = kMostStripRows / 2; step > 0; step /= 2) {
    if (row + step < rows && s.row_start[row + step] <= ref) row += step;
  }
  return row;
}

// A thread block a strip: columns counted, cut, and the blocks put in order of unit, row and column.
__global__ void __launch_bounds__(kUnitThreads) region_units(const __grid_constant__ RegionCut p) {
  extern __shared__ int32_t table[];  // first of columns, then [units][rows], twice
  __shared__ CutShared s;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const auto thread = static_cast<int>(threadIdx.x), strip = static_cast<int>(blockIdx.x);
  const int first_row = strip * p.strip_rows, rows = min(p.strip_rows, p.rows - first_row);
  if (thread <= rows) s.row_start[thread] = p.walk.starts[first_row + thread];
  for (int c = thread; c < p.columns; c += kUnitThreads) table[c] = 0;
  __syncthreads();
  const int begin = s.row_start[0], end = s.row_start[rows];
  for (int i = begin + thread; i < end; i += kUnitThreads) atomicAdd(table + p.walk.refs[i].from, 1);
  __syncthreads();
  const int all = sums_before(table, p.columns, s.of_warp);
  cut_strip(p, s, table, all);

  const int places = s.units * rows;
  for (int i = thread; i < places; i += kUnitThreads) table[i] = 0;
  __syncthreads();
  for (int i = begin + thread; i < end; i += kUnitThreads) {
    atomicAdd(table + unit_of(s, p.walk.refs[i].from) * rows + row_of(s, rows, i), 1);
  }
  __syncthreads();
  int32_t* firsts = table + places;  // the first block of each row in each unit
  if (thread < rows) {
    int first = s.row_start[thread];
    for (int unit = 0; unit < s.units; ++unit) {
      firsts[unit * rows + thread] = first;
      first += table[unit * rows + thread];
    }
  }
  __syncthreads();
  if (p.in_pairs != 0) {
    for (int i = thread; i < places; i += kUnitThreads) table[i] = (table[i] + 1) & ~1;
    __syncthreads();
  }
  const int entries = sums_before(table, places, s.of_warp);
  const int base = begin << p.in_pairs;
  if (thread < s.units) {
    const int first = table[thread * rows], last = thread + 1 < s.units ? table[(thread + 1) * rows] : entries;
    p.to.units[strip * kMostStripUnits + thread] = {s.cut[thread], s.cut[thread + 1] - s.cut[thread], base + first,
                                                    last - first};
  }
  if (thread == 0) p.to.counts[strip] = s.units;
  for (int i = begin + thread; i < end; i += kUnitThreads) {
    const BlockRef ref = p.walk.refs[i];
    const int unit = unit_of(s, ref.from), row = row_of(s, rows, i);
    const int rank = i - firsts[unit * rows + row], at = base + table[unit * rows + row] + rank;
    const auto in_strip = static_cast<uint16_t>(row), in_unit = static_cast<uint16_t>(ref.from - s.cut[unit]);
    p.to.entries[at] = {ref.weight, in_strip, in_unit};
    const bool is_last = i + 1 == s.row_start[row + 1] || p.walk.refs[i + 1].from >= s.cut[unit + 1];
    if (p.in_pairs != 0 && is_last && rank % 2 == 0) p.to.entries[at + 1] = {-1, in_strip, in_unit};
  }
}

}  // namespace

Status make_region_units(const CudaCall& call, const RegionPlan& plan, const DeviceWalk& walk, const RegionTables& to) {
  const CudaProblem& p = call.problem;
  const RegionCut args{.walk = walk,
                       .to = to,
                       .rows = static_cast<int32_t>(p.output_blocks()),
                       .columns = static_cast<int32_t>(p.input_blocks()),
                       .strip_rows = plan.strip_rows,
                       .units = plan.units,
                       .most_columns = plan.most_columns,
                       .in_pairs = p.block == 8 ? 1 : 0};
  const int words = std::max<int>(args.columns, 2 * kMostStripUnits * plan.strip_rows);
  return cuda::launch({.blocks = plan.strips,
                       .threads = kUnitThreads,
                       .shared_bytes = words * 4,
                       .stream = static_cast<cudaStream_t>(call.stream),
                       .overlap = call.card.sm90a},
                      region_units, args);
}

Status prepare_region_units() {
  constexpr int64_t kWords = std::max<int64_t>(kMostRegionColumns, 2 * kMostStripUnits * kMostStripRows);
  return cuda::prepare(region_units, static_cast<int>(kWords) * 4);
}

}  // namespace blocksparse::linear
