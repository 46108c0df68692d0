#include "gemm/cuda/wgrad_in_registers/jobs.h"

#include <algorithm>

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"

namespace blocksparse::gemm::wgrad_in_registers {
namespace {

constexpr int kJobThreads = 1024;
constexpr int kJobWarps = kJobThreads / 32;

struct Cut {
  DeviceWalk walk;
  Tables to;
  int32_t rows, columns;  // of blocks
  int32_t strip_rows, jobs, most_columns;
  int32_t in_pairs;   // 1: the entries of a row in a job are made even
  int32_t most_held;  // columns of a strip's blocks are kept in shared memory up to so many
};

struct CutShared {
  int32_t row_start[kMostStripRows + 1];
  int32_t cut[kMostStripJobs + 1];  // first column of each job
  int32_t jobs;
  int32_t of_warp[kJobWarps];

  __device__ int first_block() const { return row_start[0]; }
};

// The sum over the lanes up to this one.
__device__ int sum_up_to(int value) {
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, value, step);
    if (static_cast<int>(threadIdx.x) % 32 >= step) value += other;
  }
  return value;
}

// Replaces each of `count` values in shared memory by the sum of those in front; returns the sum of all. All threads
// call it.
__device__ int sums_before(int32_t* values, int count, int32_t* of_warp) {
  const auto thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int each = ceil_div(count, kJobThreads);
  const int first = min(thread * each, count), last = min(first + each, count);
  int mine = 0;
  for (int i = first; i < last; ++i) mine += values[i];
  const int sum = sum_up_to(mine);
  if (thread % 32 == 31) of_warp[warp] = sum;
  __syncthreads();
  if (warp == 0) of_warp[thread] = sum_up_to(of_warp[thread]);
  __syncthreads();
  int before = sum - mine + (warp > 0 ? of_warp[warp - 1] : 0);
  const int all = of_warp[kJobWarps - 1];
  for (int i = first; i < last; ++i) {
    const int value = values[i];
    values[i] = before;
    before += value;
  }
  __syncthreads();
  return all;
}

// The least over the lanes up to this one.
__device__ int least_up_to(int value) {
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, value, step);
    if (static_cast<int>(threadIdx.x) % 32 >= step) value = min(value, other);
  }
  return value;
}

// How many jobs the strip has, before their width is limited. All strips have as many if none has far more blocks than
// the others. Otherwise each has jobs by its blocks, less what strips take whose jobs would be too wide. The sum is as
// many as with even strips, or twice as many where jobs at their widest are already three quarters of it.
__device__ int jobs_of_strip(const Cut& p, CutShared& s) {
  const auto thread = static_cast<int>(threadIdx.x), strips = static_cast<int>(gridDim.x);
  const auto begin = [&](int strip) { return p.walk.starts[min(strip * p.strip_rows, p.rows)]; };
  const int first = thread < strips ? begin(thread) : 0, last = thread < strips ? begin(thread + 1) : 0;
  const int all = p.walk.starts[p.rows];
  const float even = static_cast<float>(all) / static_cast<float>(strips);
  const bool is_long = static_cast<float>(last - first) > 1.1f * even + 3 * sqrtf(even);
  if (__syncthreads_or(is_long) == 0) return p.jobs;

  const int least = ceil_div(p.columns, p.most_columns);
  const int wanted = p.jobs * strips * (4 * least > 3 * p.jobs ? 2 : 1);
  // After four attempts 4 % of 17,600 skewed layouts had more jobs than they should, which costs one more wave of
  // thread blocks. After 32 none had; most need two.
  constexpr int kMostAttempts = 32;
  int jobs = wanted, mine = 0;
  for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
    const auto before = [&](int start) { return static_cast<int>((int64_t{jobs} * start + all / 2) / all); };
    mine = min(before(last) - before(first), kMostStripJobs);
    if (thread == 0) s.jobs = 0;
    __syncthreads();
    if (thread < strips) atomicAdd(&s.jobs, max(mine, least));
    __syncthreads();
    const int more = s.jobs - wanted;
    __syncthreads();
    if (more <= 0) break;
    jobs = max(jobs - more, 1);
  }
  if (thread == static_cast<int>(blockIdx.x)) s.jobs = mine;
  __syncthreads();
  return s.jobs;
}

// Cuts the strip into equal shares of its blocks. A share is no wider than there is room for: what is beyond goes to
// the next one. No columns are left behind the last.
__device__ void cut_strip(const Cut& p, CutShared& s, const int32_t* before, int all, int of_strip) {
  static_assert(kMostStripJobs == 64);  // the threads of the first two warps
  const auto thread = static_cast<int>(threadIdx.x);
  const int room = p.most_columns, jobs = max(min(of_strip, all), ceil_div(p.columns, room));
  // The first column with job / jobs of all blocks in front of it, less the room of the jobs in front.
  int spare = p.columns;
  if (thread < jobs) {
    const auto wanted = static_cast<int>(ceil_div(int64_t{all} * thread, jobs));
    int low = 0, high = p.columns;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (before[middle] < wanted) low = middle + 1;
      else high = middle;
    }
    spare = low - thread * room;
  }
  spare = least_up_to(spare);
  if (thread == 31) s.of_warp[0] = spare;
  __syncthreads();
  if (thread >= 32) spare = min(spare, s.of_warp[0]);
  if (thread < jobs) s.cut[thread] = max(spare + thread * room, p.columns - (jobs - thread) * room);
  if (thread == 0) {
    s.cut[jobs] = p.columns;
    s.jobs = jobs;
  }
  __syncthreads();
}

// The job that a column is in.
__device__ int job_of(const CutShared& s, int column) {
  int job = 0;
#pragma unroll
  for (int step = kMostStripJobs / 2; step > 0; step /= 2) {
    if (job + step < s.jobs && s.cut[job + step] <= column) job += step;
  }
  return job;
}

// The first block of a row from `column` on. `columns` are those of the strip's blocks in shared memory, or null.
__device__ int first_from(const Cut& p, const CutShared& s, const uint16_t* columns, int row, int column) {
  int low = s.row_start[row], high = s.row_start[row + 1];
  while (low < high) {
    const int middle = (low + high) / 2;
    if ((columns != nullptr ? columns[middle - s.first_block()] : p.walk.refs[middle].from) < column) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Calls body(index, row of the strip) for the blocks of a strip; a warp has whole rows.
template <class Body>
__device__ void each_block(const CutShared& s, int rows, Body body) {
  const auto warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = warp; row < rows; row += kJobWarps) {
#pragma unroll 4
    for (int i = s.row_start[row] + lane; i < s.row_start[row + 1]; i += 32) body(i, row);
  }
}

// The table has the counts of columns first, then firsts and entries, [jobs][rows] each.
constexpr int words_of_table(int columns, int strip_rows) {
  return columns > 2 * kMostStripJobs * strip_rows ? columns : 2 * kMostStripJobs * strip_rows;
}
constexpr int kMostHeld = 16 * 1024;  // with all else in 99 KB, which every card has

// A thread block has a strip: it counts columns, cuts, and puts the blocks in the order of job, row and column.
__global__ void __launch_bounds__(kJobThreads) wgrad_in_registers_jobs(const __grid_constant__ Cut p) {
  extern __shared__ int32_t table[];
  __shared__ CutShared s;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const auto thread = static_cast<int>(threadIdx.x), strip = static_cast<int>(blockIdx.x);
  const int first_row = strip * p.strip_rows, rows = min(p.strip_rows, p.rows - first_row);
  if (thread <= rows) s.row_start[thread] = p.walk.starts[first_row + thread];
  for (int c = thread; c < p.columns; c += kJobThreads) table[c] = 0;
  const int of_strip = jobs_of_strip(p, s);  // all threads meet here
  auto* columns = reinterpret_cast<uint16_t*>(table + words_of_table(p.columns, p.strip_rows));
  if (s.row_start[rows] - s.first_block() > p.most_held) columns = nullptr;
  each_block(s, rows, [&](int i, int) {
    const int column = p.walk.refs[i].from;
    atomicAdd(table + column, 1);
    if (columns != nullptr) columns[i - s.first_block()] = static_cast<uint16_t>(column);
  });
  __syncthreads();
  const int all = sums_before(table, p.columns, s.of_warp);
  cut_strip(p, s, table, all, of_strip);

  const int places = s.jobs * rows;
  int32_t *firsts = table, *entries = table + places;
  for (int i = thread; i < places; i += kJobThreads) firsts[i] = first_from(p, s, columns, i % rows, s.cut[i / rows]);
  __syncthreads();
  const auto end_of = [&](int place, int row) {
    return place + rows < places ? firsts[place + rows] : s.row_start[row + 1];
  };
  for (int i = thread; i < places; i += kJobThreads) {
    const int blocks = end_of(i, i % rows) - firsts[i];
    entries[i] = p.in_pairs != 0 ? (blocks + 1) & ~1 : blocks;
  }
  __syncthreads();
  const int all_entries = sums_before(entries, places, s.of_warp);
  const int base = s.first_block() << p.in_pairs;
  if (thread < s.jobs) {
    const int first = entries[thread * rows], last = thread + 1 < s.jobs ? entries[(thread + 1) * rows] : all_entries;
    p.to.jobs[strip * kMostStripJobs + thread] = {s.cut[thread], s.cut[thread + 1] - s.cut[thread], base + first,
                                                  last - first};
  }
  if (thread == 0) p.to.counts[strip] = s.jobs;
  each_block(s, rows, [&](int i, int row) {
    const BlockRef ref = p.walk.refs[i];
    const int job = job_of(s, ref.from), place = job * rows + row;
    const int rank = i - firsts[place], at = base + entries[place] + rank;
    const auto in_strip = static_cast<uint16_t>(row), in_job = static_cast<uint16_t>(ref.from - s.cut[job]);
    p.to.entries[at] = {ref.weight, in_strip, in_job};
    const bool lacks_one = p.in_pairs != 0 && rank % 2 == 0 && i + 1 == end_of(place, row);
    if (lacks_one) p.to.entries[at + 1] = {-1, in_strip, in_job};
  });
}

}  // namespace

Status make_jobs(const CudaCall& call, const Plan& plan, const DeviceWalk& walk, const Tables& to) {
  const CudaProblem& p = call.problem;
  const Cut args{.walk = walk,
                 .to = to,
                 .rows = static_cast<int32_t>(p.output_blocks()),
                 .columns = static_cast<int32_t>(p.input_blocks()),
                 .strip_rows = plan.strip_rows,
                 .jobs = plan.jobs,
                 .most_columns = plan.most_columns,
                 .in_pairs = p.block == 8 ? 1 : 0,
                 .most_held = static_cast<int32_t>(std::min<int64_t>(2 * p.blocks / plan.strips, kMostHeld))};
  const int table_bytes = words_of_table(args.columns, plan.strip_rows) * 4;
  return cuda::launch({.blocks = plan.strips,
                       .threads = kJobThreads,
                       .shared_bytes = table_bytes + args.most_held * 2,
                       .stream = static_cast<cudaStream_t>(call.stream),
                       .overlap = call.card.sm90a},
                      wgrad_in_registers_jobs, args);
}

Status prepare_jobs() {
  constexpr int kWords = words_of_table(static_cast<int>(kMostColumns), kMostStripRows);
  return cuda::prepare(wgrad_in_registers_jobs, kWords * 4 + kMostHeld * 2);
}

}  // namespace blocksparse::gemm::wgrad_in_registers
