#include "gemm/cuda/wgrad_wgmma/jobs.h"

#include <algorithm>

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"

namespace blocksparse::gemm::wgrad_wgmma {
namespace {

constexpr int kThreads = 256;
static_assert(kThreads > kMostGrid);
constexpr int kMostStripRows = 16;  // of blocks

struct PatchList {
  DeviceWalk walk;
  Tables to;
  int32_t block_shift;
  int32_t rows, strip_rows, chunks;
  int32_t patch_shift;  // inputs of a patch
  int32_t id_columns;   // blocks of a patch side by side; 0: a block has several patches
  int32_t ids;          // of a patch

  __device__ int patches_of_block() const { return id_columns == 0 ? 2 : 1; }
  // The first patch of a strip whose first block is `first_block`. There is room for as many patches as the strips in
  // front may have.
  __device__ int first_patch(int strip, int first_block) const {
    return static_cast<int>(min(int64_t{strip} * chunks, int64_t{first_block} * patches_of_block()));
  }
};

// How a strip's patches are made jobs. kFull: jobs of 2^shift patches and one of the rest. kHalf: jobs of half as many,
// where full ones would leave thread blocks without work. kEqual: jobs as equal as they come.
enum JobSizes : int { kFull, kHalf, kEqual, kChoices };

struct JobList {
  Tables to;
  int32_t strips;
  Form form;
  int32_t most_shift;  // of the form's patches
  int32_t grid, steps;

  __device__ int shift_of(int choice) const { return most_shift - (choice == kHalf); }
};

// The sum of `value` over the threads in front, and over all; `of_warp` has an entry for each warp.
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

// Lists the patches of a strip: which chunks of inputs they are, and which blocks they hold.
__device__ void make_patches(const PatchList& p, int strip, int32_t* of_warp) {
  __shared__ int32_t row_start[kMostStripRows + 1];
  __shared__ int32_t patch_of[kMostChunks];
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread <= p.strip_rows) row_start[thread] = p.walk.starts[min(strip * p.strip_rows + thread, p.rows)];
  for (int c = thread; c < p.chunks; c += kThreads) patch_of[c] = 0;
  __syncthreads();
  const int begin = row_start[0], end = row_start[p.strip_rows];
  const int patches_of_block = p.patches_of_block();
  const auto chunk_of = [&](int from) {
    return p.id_columns == 0 ? 2 * from
                             : static_cast<int>((static_cast<int64_t>(from) << p.block_shift) >> p.patch_shift);
  };
  for (int i = begin + thread; i < end; i += kThreads) {
    for (int half = 0; half < patches_of_block; ++half) patch_of[chunk_of(p.walk.refs[i].from) + half] = 1;
  }
  __syncthreads();
  const int each = ceil_div(p.chunks, kThreads);
  const int first = min(thread * each, p.chunks), last = min(first + each, p.chunks);
  int mine = 0;
  for (int c = first; c < last; ++c) mine += patch_of[c];
  const int2 count = before_and_all(mine, of_warp);
  const int base = p.first_patch(strip, begin);
  for (int c = first, patch = base + count.x; c < last; ++c) {
    if (patch_of[c] == 0) continue;
    patch_of[c] = patch;
    p.to.chunks[patch++] = c;
  }
  if (thread == 0) p.to.counts[strip] = {base, count.y};
  if (p.ids > 1) {
    auto* pairs = reinterpret_cast<int2*>(p.to.ids + int64_t{base} * p.ids);  // the number of ids is even
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
    for (int half = 0; half < patches_of_block; ++half) {
      const int64_t patch = patch_of[chunk_of(ref.from) + half];
      const int id = p.ids == 1 ? 0 : row * p.id_columns + ref.from % p.id_columns;
      p.to.ids[patch * p.ids + id] = ref.weight;
    }
  }
}

// ---- Jobs ----------------------------------------------------------------------------------------------------------
// Loops stay short here: instructions that run once have to be fetched, and unrolled loops took 20 us more.

// of[k]: how many jobs have more than k patches; none has more than 16.
struct JobCounts {
  int32_t of[32];

  // Turns how many jobs have exactly k + 1 patches into how many have more than k. A warp calls it.
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
  // The patches of a job, if jobs of most patches come first.
  __device__ int patches_at(int job) const {
    int patches = 0;
#pragma unroll 1
    for (int step = 16; step > 0; step /= 2) {
      if (of[patches + step - 1] > job) patches += step;
    }
    return patches;
  }
};

struct JobTime {
  float time;  // in cost times steps
  bool cut;    // jobs beyond the last whole wave are cut
};

// Cut jobs of one wave take 1.5 to 1.8 times as long. Where nearly all jobs of a wave are cut, they are at tokens far
// apart, and x comes from DRAM. With 374 jobs for 132 thread blocks that took 940 us, in turn 578 (4096 x 14336, b =
// 32, .1).
constexpr float kMostCutFactor = 1.6f;

// A warp computes it; its lanes stand for 32 of the grid's thread blocks.
__device__ JobTime time_of(const JobCounts& counts, const JobList& p) {
  const int lane = static_cast<int>(threadIdx.x) % 32, jobs = counts.all(), whole = jobs - jobs % p.grid;
  const int block = lane * (p.grid - 1) / 31;
  int of_rounds = 0, of_all = 0;
#pragma unroll 1
  for (int wave = 0, job = block; job < jobs; job = job_in_turn(++wave, block, p.grid)) {
    of_all += p.form.cost_of(counts.patches_at(job));
    if (job < whole) of_rounds = of_all;
  }
  const int cut_of_size = lane < 31 ? max(counts.of[lane] - max(counts.of[lane + 1], whole), 0) : 0;
  const int of_rest = __reduce_add_sync(~0u, cut_of_size * p.form.cost_of(lane + 1));
  of_rounds = __reduce_max_sync(~0u, of_rounds);
  of_all = __reduce_max_sync(~0u, of_all);
  const auto steps = static_cast<float>(p.steps), in_turn = static_cast<float>(of_all) * steps;
  const float factor = whole == 0 || 3 * (jobs - whole) > 2 * p.grid ? kMostCutFactor : 1;
  const float part = factor * static_cast<float>(of_rest) / static_cast<float>(p.grid);
  const float cut = (static_cast<float>(of_rounds) + part) * steps + static_cast<float>(p.form.combine_cost);
  return {min(in_turn, cut), whole < jobs && cut < in_turn};
}

struct JobChoice {
  int index, shift;
  bool cut;
  int jobs;
};

// Chooses the way that takes the least time. All threads call it; patches_of(strip) is {the first patch, how many}.
template <class PatchesOf>
__device__ JobChoice choose_jobs(const JobList& p, JobCounts (&counts)[kChoices], PatchesOf patches_of) {
  __shared__ JobTime times[kChoices];
  const auto thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  if (thread < 32 * kChoices) counts[warp].of[thread % 32] = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < p.strips * kChoices; i += kThreads) {
    const int patches = patches_of(i / kChoices).y, choice = i % kChoices, shift = p.shift_of(choice);
    const int jobs = (patches + (1 << shift) - 1) >> shift,
              size = choice == kEqual ? patches / max(jobs, 1) : 1 << shift;
    // Other jobs have one patch more (equal ones), or what is left.
    const int others = choice == kEqual ? patches - size * jobs : jobs - (patches >> shift);
    const int of_others = choice == kEqual ? size + 1 : patches & ((1 << shift) - 1);
    if (jobs > others) atomicAdd(counts[choice].of + size - 1, jobs - others);
    if (others > 0) atomicAdd(counts[choice].of + of_others - 1, others);
  }
  __syncthreads();
  if (warp < kChoices) {
    counts[warp].add_up();
    const JobTime time = time_of(counts[warp], p);
    if (thread % 32 == 0) times[warp] = time;
  }
  __syncthreads();
  // Half as many patches must be clearly better by this count. Where they were hardly better they were worse: 181 us
  // instead of 152 (6144 x 6144, b = 64, .1).
  int best = times[kHalf].time < 0.85f * times[kFull].time ? kHalf : kFull;
  // Equal jobs do not lie in the order of their patches, so the ones that are cut need not be the smallest.
  const float equal = times[kEqual].cut ? 1.1f * times[kEqual].time : times[kEqual].time;
  if (equal < times[best].time) best = kEqual;
  return {best, p.shift_of(best), times[best].cut, counts[best].all()};
}

// The order of the strips' last jobs: most patches first, and equal ones in the order of strips. before(patches) is how
// many jobs of so many patches lie in front of this thread's; with 0 patches the thread has none. All threads call it.
struct RestPlaces {
  int32_t of_warps[kThreads / 32][32];

  __device__ int before(int patches) {
    const auto lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const unsigned same = __match_any_sync(~0u, patches);
    const int before = __popc(same & ((1u << lane) - 1));
    of_warps[warp][lane] = 0;
    __syncwarp();
    if (before == 0) of_warps[warp][patches] = __popc(same);
    __syncthreads();
    int sum = before;
#pragma unroll 1
    for (int other = 0; other < warp; ++other) sum += of_warps[other][patches];
    return sum;
  }
  __device__ int all(int patches) const {
    int sum = 0;
#pragma unroll 1
    for (const auto& of_warp : of_warps) sum += of_warp[patches];
    return sum;
  }
};

// Makes jobs of patches. Those of most patches come first, and jobs of as many in the order of strips, so that
// neighbours share their dy. Equal jobs (kEqual) lie in the order of strips alone.
template <class PatchesOf>
__device__ JobChoice list_jobs(const JobList& p, int32_t* of_warp, PatchesOf patches_of) {
  __shared__ JobCounts counts[kChoices];
  __shared__ RestPlaces places;
  __shared__ int32_t rest_before[32];
  const auto thread = static_cast<int>(threadIdx.x);
  const JobChoice choice = choose_jobs(p, counts, patches_of);
  const int shift = choice.shift;
  const bool equal = choice.index == kEqual;
  if (thread < 31) rest_before[thread] = counts[choice.index].of[thread];  // jobs of more patches
  int jobs = 0;
#pragma unroll 1
  for (int first = 0; first < p.strips; first += kThreads) {
    const int strip = first + thread;
    const int2 patches = strip < p.strips ? patches_of(strip) : int2{0, 0};
    const int all = (patches.y + (1 << shift) - 1) >> shift, full = equal ? all : patches.y >> shift;
    const int2 before = before_and_all(full, of_warp);
#pragma unroll 1
    for (int i = 0; i < full; ++i) {
      const int from = equal ? patches.y * i / all : i << shift,
                to = equal ? patches.y * (i + 1) / all : (i + 1) << shift;
      p.to.jobs[jobs + before.x + i] = {strip, patches.x + from, to - from, 0};
    }
    jobs += before.y;
    if (equal) continue;
    const int rest = patches.y - (full << shift);
    const int at = rest_before[rest] + places.before(rest);
    if (rest > 0) p.to.jobs[at] = {strip, patches.x + patches.y - rest, rest, 0};
    __syncthreads();
    if (thread < 31) rest_before[thread] += places.all(thread);
    __syncthreads();
  }
  __syncthreads();
  return choice;
}

// One thread block lists all jobs. Those beyond the last whole wave of the grid are taken in turn too; or all thread
// blocks share them in equal parts of their cost, if that is over sooner.
template <class PatchesOf>
__device__ void make_job_list(const JobList& p, int32_t* of_warp, PatchesOf patches_of) {
  __shared__ int32_t cost_before[kMostGrid + 1];
  const auto thread = static_cast<int>(threadIdx.x);
  const JobChoice choice = list_jobs(p, of_warp, patches_of);
  const int shared = choice.cut ? choice.jobs % p.grid : 0, whole = choice.jobs - shared;
  const int cost = thread < shared ? p.form.cost_of(p.to.jobs[whole + thread].patches) : 0;
  const int2 sum = before_and_all(cost, of_warp);
  if (thread <= shared) cost_before[thread] = sum.x;
  __syncthreads();
  if (thread == 0) p.to.shares[0] = {choice.jobs, whole};
  if (thread > p.grid) return;
  // In cost times steps, because units of cost are too coarse for few jobs. With 4 jobs of cost 5 only 20 of 132 thread
  // blocks had work, and a gradient of 256 x 256 and 50,000 tokens took 110 us.
  const int64_t at = int64_t{sum.y} * p.steps * thread / p.grid;
  int job = 0;
  for (int jump = 128; jump > 0; jump /= 2) {
    if (job + jump <= shared && int64_t{cost_before[job + jump]} * p.steps <= at) job += jump;
  }
  int step = 0;
  if (job < shared) {
    const int64_t inner = at - int64_t{cost_before[job]} * p.steps;
    step = static_cast<int>(inner / (cost_before[job + 1] - cost_before[job]));
  }
  p.to.shares[1 + thread] = {whole + job, step};
}

// A thread block has a strip. `Beside`: one more thread block makes the jobs. It need not wait until the patches are
// counted where a strip is a row of blocks, which saves 4 us of 73 (b = 128, density .25, 4096 x 4096, 4096 tokens).
template <bool Beside>
__global__ void __launch_bounds__(kThreads)
    wgrad_wgmma_patches(const __grid_constant__ PatchList p, const __grid_constant__ JobList jobs) {
  __shared__ int32_t of_warp[kThreads / 32];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const auto strip = static_cast<int>(blockIdx.x);
  if (!Beside || strip < jobs.strips) {
    make_patches(p, strip, of_warp);
    return;
  }
  make_job_list(jobs, of_warp, [&p](int row) {
    const int begin = p.walk.starts[row], end = p.walk.starts[row + 1];
    return int2{p.first_patch(row, begin), (end - begin) * p.patches_of_block()};
  });
}

__global__ void __launch_bounds__(kThreads) wgrad_wgmma_jobs(const __grid_constant__ JobList p) {
  __shared__ int32_t of_warp[kThreads / 32];
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  make_job_list(p, of_warp, [&p](int strip) { return p.to.counts[strip]; });
}

}  // namespace

Status make_jobs(const CudaCall& call, const Form& form, const DeviceWalk& walk, const Tables& to, int32_t grid,
                 int32_t steps) {
  const CudaProblem& p = call.problem;
  const Plan plan = plan_of(p, form);
  const auto log2_of = [](int32_t value) { return __builtin_ctz(static_cast<unsigned>(value)); };
  const PatchList patches{.walk = walk,
                          .to = to,
                          .block_shift = log2_of(p.block),
                          .rows = static_cast<int32_t>(p.output_blocks()),
                          .strip_rows = std::max(1, form.strip_outputs / p.block),
                          .chunks = static_cast<int32_t>(plan.chunks),
                          .patch_shift = log2_of(form.patch_inputs),
                          .id_columns = form.patch_inputs / p.block,
                          .ids = form.ids};
  const JobList jobs{.to = to,
                     .strips = static_cast<int32_t>(plan.strips),
                     .form = form,
                     .most_shift = log2_of(form.most_patches),
                     .grid = grid,
                     .steps = steps};
  const auto stream = static_cast<cudaStream_t>(call.stream);
  if (patches.strip_rows == 1 && form.ids == 1) {
    return cuda::launch({.blocks = plan.strips + 1, .threads = kThreads, .stream = stream, .overlap = true},
                        wgrad_wgmma_patches<true>, patches, jobs);
  }
  BS_RETURN_IF_ERROR(cuda::launch({.blocks = plan.strips, .threads = kThreads, .stream = stream, .overlap = true},
                                  wgrad_wgmma_patches<false>, patches, jobs));
  return cuda::launch({.threads = kThreads, .stream = stream, .overlap = true}, wgrad_wgmma_jobs, jobs);
}

Status prepare_jobs() {
  BS_RETURN_IF_ERROR(cuda::prepare(wgrad_wgmma_patches<true>, 0));
  BS_RETURN_IF_ERROR(cuda::prepare(wgrad_wgmma_patches<false>, 0));
  return cuda::prepare(wgrad_wgmma_jobs, 0);
}

}  // namespace blocksparse::gemm::wgrad_wgmma
