// The jobs of wgrad of up to 3 x 3 taps: patches of some inputs that share a strip of 64 outputs. Every thread block
// finds all jobs and its own steps by itself. Two kernels in front, which made tables, took 6 us.
#pragma once

#include "core/ceil_div.h"
#include "gemm/cuda/call.h"
#include "gemm/cuda/wgrad_wgmma/jobs.h"
#include "ops/conv/cuda/halo/plan.h"

namespace blocksparse::conv {
namespace {

struct HaloPatches {
  gemm::DeviceWalk blocks;
  int32_t rows, block_shift;  // of blocks
  int32_t strips, words;      // words of 32 patches, for each strip
  int32_t steps;              // of a job
};

struct HaloJob {
  int strip, patches;
  int chunk[2];  // the inputs of each patch
};

// What the kernel leaves for the kernel that adds parts.
struct HaloTables {
  int4* counts;                      // jobs, the first that is shared, thread blocks
  gemm::wgrad_wgmma::Share* shares;  // [thread blocks + 1]
  int4* jobs;                        // [shared] strip, patches, chunks
  int32_t* ids;                      // [shared][kHaloIds]
  float* parts;                      // [2 grid][rows of taps][sums of a thread][128 threads]
};

// The jobs, in the shared memory of each thread block.
struct HaloJobs {
  uint32_t bits[kMostHaloWords];  // [strips][words] a bit for each patch that has a block
  int32_t patches_before[kMostHaloStrips + 1], jobs_before[kMostHaloStrips + 1];
  gemm::wgrad_wgmma::Share begin, end;
  int32_t grid, whole;  // thread blocks that have work; jobs before the first that is shared

  __device__ int jobs(const HaloPatches& c) const { return jobs_before[c.strips]; }

  // The last strip with at most `value` in front of it.
  __device__ static int strip_of(const int32_t* before, int strips, int64_t value, int64_t times) {
    int low = 0, high = strips;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (before[middle] * times <= value) low = middle;
      else high = middle - 1;
    }
    return low;
  }
  __device__ int parts(int strip) const { return jobs_before[strip + 1] - jobs_before[strip]; }
  __device__ int patches(int strip) const { return patches_before[strip + 1] - patches_before[strip]; }
  __device__ int patches_before_part(int strip, int part) const { return patches(strip) * part / parts(strip); }

  __device__ int chunk_of(const HaloPatches& c, int strip, int patch) const {
    const uint32_t* of = bits + strip * c.words;
    int chunk = 0;
    for (; patch >= __popc(*of); chunk += 32) patch -= __popc(*of++);
    uint32_t word = *of;
    for (; patch > 0; --patch) word &= word - 1;
    return chunk + __ffs(static_cast<int>(word)) - 1;
  }

  __device__ HaloJob job(const HaloPatches& c, int index) const {
    const int strip = strip_of(jobs_before, c.strips, index, 1), part = index - jobs_before[strip];
    const int first = patches_before_part(strip, part), last = patches_before_part(strip, part + 1);
    return {strip, last - first, {chunk_of(c, strip, first), chunk_of(c, strip, last - 1)}};
  }

  // Where thread block `i` begins in the shared jobs, each of which costs as much as it has patches.
  __device__ gemm::wgrad_wgmma::Share share(const HaloPatches& c, int i) const {
    const int first = strip_of(jobs_before, c.strips, whole, 1);
    int64_t before = patches_before[first];
    if (first < c.strips) before += patches_before_part(first, whole - jobs_before[first]);
    const int64_t at = before * c.steps + (patches_before[c.strips] - before) * c.steps * i / grid;
    const int strip = strip_of(patches_before, c.strips, at, c.steps);
    if (strip == c.strips) return {jobs(c), 0};
    const int64_t inner = at - int64_t{patches_before[strip]} * c.steps;
    const int count = patches(strip), part = ((static_cast<int>(inner / c.steps) + 1) * parts(strip) - 1) / count;
    const int from = patches_before_part(strip, part), to = patches_before_part(strip, part + 1);
    return {jobs_before[strip] + part, static_cast<int>((inner - int64_t{from} * c.steps) / (to - from))};
  }
};

// Finds the jobs; all threads of a thread block call it.
template <class K>
__device__ void find_jobs(HaloJobs& u, const HaloPatches& c) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warps = static_cast<int>(blockDim.x) / 32;
  for (int i = thread; i < c.strips * c.words; i += static_cast<int>(blockDim.x)) u.bits[i] = 0;
  __syncthreads();
  const int split = max(0, c.block_shift - 6);  // log2 of strips and patches along a block
  for (int row = thread / 32; row < c.rows; row += warps) {
    const int last = c.blocks.starts[row + 1] << split;
    for (int i = (c.blocks.starts[row] << split) + lane; i < last; i += 32) {
      const int from = c.blocks.refs[i >> split].from;
      const int input = (from << c.block_shift) + ((i & ((1 << split) - 1)) << 6), patch = input / K::kPatch;
      for (int part = 0; part < 1 << split; ++part) {
        const int strip = (row << c.block_shift >> 6) + part;
        if (strip < c.strips) atomicOr(u.bits + strip * c.words + patch / 32, 1u << patch % 32);
      }
    }
  }
  __syncthreads();
  if (thread < 32) {
    int2 before{0, 0};
    for (int first = 0; first <= c.strips; first += 32) {
      const int strip = first + lane;
      int2 mine{0, 0};
      for (int i = 0; strip < c.strips && i < c.words; ++i) mine.x += __popc(u.bits[strip * c.words + i]);
      mine.y = ceil_div(mine.x, K::kPatches);
      int2 sum = mine;
      for (int step = 1; step < 32; step *= 2) {
        const int patches = __shfl_up_sync(~0u, sum.x, step), jobs = __shfl_up_sync(~0u, sum.y, step);
        if (lane >= step) sum.x += patches, sum.y += jobs;
      }
      if (strip <= c.strips) {
        u.patches_before[strip] = before.x + sum.x - mine.x;
        u.jobs_before[strip] = before.y + sum.y - mine.y;
      }
      before.x += __shfl_sync(~0u, sum.x, 31), before.y += __shfl_sync(~0u, sum.y, 31);
    }
    // Jobs beyond the last whole wave are shared. A thread block gets at least some steps, because fewer are not worth
    // the sums.
    const int jobs = before.y;
    const int64_t worth = int64_t{jobs} * c.steps / kLeastHaloSteps;
    const int grid = static_cast<int>(max(int64_t{1}, min(worth, int64_t{gridDim.x}))), rest = jobs % grid;
    if (lane == 0) u.grid = grid, u.whole = 5 * rest >= 4 * grid ? jobs : jobs - rest;
  }
  __syncthreads();
  if (thread == 0) u.begin = u.share(c, static_cast<int>(blockIdx.x));
  if (thread == 32) u.end = u.share(c, static_cast<int>(blockIdx.x) + 1);
  __syncthreads();
}

// The jobs and steps of a thread block, in turn: first whole jobs, then its part of the shared ones.
class HaloWork {
 public:
  int job, first = 0, last = 0;

  __device__ HaloWork(const HaloJobs& u, const HaloPatches& c)
      : job(static_cast<int>(blockIdx.x) - u.grid), u_(u), steps_(c.steps) {}

  __device__ bool next() {
    if (!shared_ && (job += u_.grid) < u_.whole) {
      first = 0, last = steps_;
      return true;
    }
    job = shared_ ? job + 1 : u_.begin.job;
    shared_ = true;
    first = job == u_.begin.job ? u_.begin.step : 0;
    last = job == u_.end.job ? u_.end.step : steps_;
    return job < u_.end.job || (job == u_.end.job && u_.end.step > first);
  }
  __device__ bool is_whole() const { return first == 0 && last == steps_; }

 private:
  const HaloJobs& u_;
  int steps_;
  bool shared_ = false;
};

// Block `index` of a job, [patches][rows of blocks][columns of blocks]; -1: there is none.
template <class K>
__device__ int32_t block_of_job(const HaloPatches& c, const HaloJob& job, int index) {
  const int columns = max(1, K::kPatch >> c.block_shift), ids = max(1, 64 >> c.block_shift) * columns;
  const int patch = index / ids, row = (job.strip << 6 >> c.block_shift) + index % ids / columns;
  if (patch >= job.patches || row >= c.rows) return -1;
  const int column = (job.chunk[patch] * K::kPatch >> c.block_shift) + index % columns;
  int low = c.blocks.starts[row];
  const int end = c.blocks.starts[row + 1];
  for (int high = end; low < high;) {
    const int middle = (low + high) / 2;
    if (c.blocks.refs[middle].from < column) low = middle + 1;
    else high = middle;
  }
  if (low == end) return -1;
  const BlockRef found = c.blocks.refs[low];
  return found.from == column ? found.weight : -1;
}

// Leaves the tables of the shared jobs, one job for each thread block. 64 threads call it.
template <class K>
__device__ void leave_tables(const HaloTables& to, const HaloJobs& u, const HaloPatches& c, int thread) {
  const int here = static_cast<int>(blockIdx.x), index = u.whole + here;
  if (thread == 0) {
    to.shares[here] = u.begin;
    if (here + 1 == u.grid) to.shares[u.grid] = u.end;
    if (here == 0) *to.counts = {u.jobs(c), u.whole, u.grid, 0};
  }
  if (index >= u.jobs(c)) return;
  const HaloJob job = u.job(c, index);
  if (thread == 0) to.jobs[here] = {job.strip, job.patches, job.chunk[0], job.chunk[1]};
  if (thread < kHaloIds) to.ids[here * kHaloIds + thread] = block_of_job<K>(c, job, thread);
}

}  // namespace
}  // namespace blocksparse::conv
