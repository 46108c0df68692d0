// The last steps of wgrad for many tokens: whole jobs are stored to dW, parts of cut jobs are added first, and gates'
// gradients are summed.
#pragma once

#include "cuda/ptx/griddepcontrol.h"
#include "cuda/turn_quad.h"
#include "gemm/cuda/wgrad_wgmma/form.cuh"

namespace blocksparse::gemm::wgrad_wgmma {
namespace {

// ---- Store ----------------------------------------------------------------------------------------------------------

// Where 8 sums of a row of dW go; id < 0: nowhere.
struct EightSums {
  int32_t id = -1;
  int inside = 0;  // the matrix
  int64_t at = 0;  // in dW
};

// The place of a lane's sums. A warpgroup has [64, 256] sums, whose columns are eight fours of eights: a lane has two
// rows, and of each four one eight. `thread` counts both warpgroups. Tables are read as constants: otherwise every
// store would be waited for.
template <class K>
struct PlaceOfSums {
  const Args& g;
  const Job& job;
  PatchesOfGroup<K> patches;
  int row, column;

  __device__ PlaceOfSums(const Args& g, const Job& job, int thread)
      : g(g),
        job(job),
        patches(job, thread / 128),
        row(thread % 128 / 32 * 16 + thread % 32 / 4 + (K::wide ? thread / 128 * 64 : 0)),
        column(thread % 4 * 8) {}

  // The eight in the upper row (half 0), or 8 rows below.
  __device__ EightSums eight(int four, int half) const {
    const int shift = g.block_shift, in_block = (1 << shift) - 1;
    const int id_columns = max(K::kPatch >> shift, 1), ids = (K::form.strip_outputs >> shift) * id_columns;
    const int patch = four * 32 / K::kPatch, of_patch = four * 32 % K::kPatch + column, r = row + 8 * half;
    if (patch >= patches.count) return {};
    const int64_t index = job.first_patch + patches.first + patch;
    const int64_t input = int64_t{__ldg(g.tables.chunks + index)} * K::kPatch + of_patch;
    const int32_t id = __ldg(g.tables.ids + index * ids + (r >> shift) * id_columns + (of_patch >> shift));
    const bool inside = int64_t{job.strip} * K::form.strip_outputs + r < g.outputs;
    return {id, inside ? static_cast<int>(min(max(g.inputs - input, int64_t{0}), int64_t{8})) : 0,
            (((int64_t{id} << shift) + (r & in_block)) << shift) + (input & in_block)};
  }
};

// Exchanges sums among four lanes, so that a lane has a whole eight. sums(j, i) is one of the four sums that it had of
// the j-th eight: pairs of two rows.
template <class Sums>
__device__ inline void turn_eight(Sums sums, int half, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = sums(j, 2 * half + i);
    cuda::turn_quad(words);
#pragma unroll
    for (int j = 0; j < 4; ++j) values[2 * j + i] = words[j];
  }
}

// Leaves <S, W> of the 16 x 8, or 8 x 8, in which this lane has a row. All lanes call it.
__device__ inline void leave_gate_part(const Args& g, const EightSums& to, float product) {
  for (int step = 4; step < 32; step *= 2) product += __shfl_xor_sync(~0u, product, step);
  if (threadIdx.x % 32 >= 4 || to.id < 0) return;
  const int in_block = (1 << g.block_shift) - 1, columns = 1 << (g.block_shift - 3), rows = max(columns / 2, 1);
  const int row = static_cast<int>(to.at >> g.block_shift) & in_block, column = static_cast<int>(to.at) & in_block;
  g.gate_parts[(int64_t{to.id} * rows + row / 16) * columns + column / 8] = product;
}

// Where the sums of a four go: its eights of the upper row and of the lower.
struct FourSums {
  EightSums eights[2];
  template <class K>
  __device__ FourSums(const PlaceOfSums<K>& place, int four) : eights{place.eight(four, 0), place.eight(four, 1)} {}
};

template <class T, class Sums>
__device__ inline void store_four(const GradientTarget& target, const FourSums& four, Sums sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const EightSums& to = four.eights[half];
    float values[8];
    turn_eight(sums, half, values);
    if (to.id < 0) continue;
    if (target.is_aligned() && (to.inside == 8 || !target.accumulate)) {  // otherwise the edge of dW would not be left
                                                                          // alone
      target.template store_eight<T>(to.id, to.at, to.inside, values);
      continue;
    }
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      target.template store_pair<T>(to.id, to.at + k, min(max(to.inside - k, 0), 2), {values[k], values[k + 1]});
    }
  }
}

template <class T, class Sums>
__device__ inline void leave_gates_of_four(const Args& g, const FourSums& four, Sums sums) {
  float product = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const EightSums& to = four.eights[half];
    float values[8];
    turn_eight(sums, half, values);
    if (g.block_shift == 3) product = 0;
    if (to.id >= 0) product += gate_product_of_eight<T>(g.w, to.at, to.inside, values);
    if (g.block_shift == 3 || half == 1) leave_gate_part(g, to, product);
  }
}

// Stores all that a warpgroup has of a job. It is a loop whose sums move up, because registers have no index: straight
// code for 128 sums runs once and takes 18 us to be fetched.
template <class K>
__device__ inline void store_job(const Args& g, const Job& job, Sums& sums) {
  using T = typename K::Element;
  const PlaceOfSums<K> place(g, job, static_cast<int>(threadIdx.x));
  const auto sum = [&](int j, int i) { return sums[4 * j + i]; };
  FourSums to(place, 0);
#pragma unroll 1
  for (int four = 0; four * 32 < place.patches.count * K::kPatch; ++four) {
    const FourSums next(place, four + 1);
    store_four<T>(g.target, to, sum);
    if (g.gate_parts != nullptr) leave_gates_of_four<T>(g, to, sum);
    to = next;
#pragma unroll
    for (int i = 0; i + 16 < 128; ++i) sums[i] = sums[i + 16];
  }
}

// ---- Jobs that were cut --------------------------------------------------------------------------------------------

// Where a warpgroup leaves partial sums, four of each eight of columns: [eights][128 threads]. A thread block has at
// most two parts: one of a job that it begins in the midst, one of a job that it begins with the first token.
__device__ inline float4* part_of(const Args& g, int thread_block, bool from_start, int thread) {
  auto* parts = reinterpret_cast<float4*>(g.tables.parts);
  return parts + ((2 * int64_t{thread_block} + from_start) * 2 + thread / 128) * (32 * 128) + thread % 128;
}

// The thread blocks that have parts of a job.
struct Parts {
  int first, last;
  __device__ bool is_whole() const { return first == last; }
};

// They go from the last thread block that begins before the job or with it, to the last one that begins within it.
__device__ inline Parts parts_of(const Share* shares, int grid, int job) {
  int before = 0, within = 0;  // how many thread blocks do
  for (int jump = 128; jump > 0; jump /= 2) {
    const Share a = shares[min(before + jump, grid) - 1], b = shares[min(within + jump, grid) - 1];
    if (before + jump <= grid && (a.job < job || (a.job == job && a.step == 0))) before += jump;
    if (within + jump <= grid && b.job <= job) within += jump;
  }
  return {before - 1, within - 1};
}

// A task adds 32 columns of both warpgroups of a job, or of some of their threads. Where there are few jobs, several
// runs of parts are added side by side, each in the order of tokens; then the runs are added.
struct CombineForm {
  static constexpr int kThreads = 512, kBlocksPerSm = 2;
  int runs = 1, threads = 256;  // of a task

  __device__ CombineForm(int jobs, int grid) {
    while (runs < 16 && 2 * runs * jobs <= grid / 2) runs *= 2;
    threads = min(256, kThreads / runs);
  }
  __device__ int tasks_of_job() const { return 8 * (256 / threads); }
  __device__ int at_once() const { return kThreads / (threads * runs); }  // of a thread block
};

__device__ inline void add_to(float4& sum, const float4& more) {
  sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
}

// Adds the sums of `four` from the parts of thread blocks `first` to `end` - 1.
__device__ inline void add_parts(const Args& g, const Share* shares, int first, int end, bool from_start, int thread,
                                 int four, float4 (&sums)[4]) {
  for (int c = first; c < end; ++c, from_start = false) {
    if (shares[c].job == shares[c + 1].job && shares[c].step == shares[c + 1].step) continue;  // it has no step
    const float4* part = part_of(g, c, from_start, thread) + four * 4 * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) add_to(sums[i], part[i * 128]);
  }
}

template <class K>
__global__ void __launch_bounds__(CombineForm::kThreads, CombineForm::kBlocksPerSm)
    wgrad_wgmma_combine(const __grid_constant__ Args g, int32_t grid) {
  __shared__ Share shares[kMostGrid + 1];
  __shared__ float4 of_run[4][CombineForm::kThreads];
  ptx::griddepcontrol_wait();
  const int2 counts = g.tables.job_counts();
  const CombineForm form(counts.x - counts.y, grid);
  const auto index = static_cast<int>(threadIdx.x);
  for (int i = index; i <= grid; i += CombineForm::kThreads) shares[i] = g.tables.share(i);
  __syncthreads();
  const int run = index / form.threads % form.runs, of_job = form.tasks_of_job();
  const int tasks = (counts.x - counts.y) * of_job;
  for (int first = static_cast<int>(blockIdx.x) * form.at_once(); first < tasks;
       first += static_cast<int>(gridDim.x) * form.at_once()) {
    const int of_block = first + index / form.threads / form.runs, task = min(of_block, tasks - 1);
    const int place = counts.y + task / of_job, four = task % 8;
    const int thread = task % of_job / 8 * form.threads + index % form.threads;
    const Parts parts = parts_of(shares, grid, place);
    const Job job = g.tables.jobs[place];
    const bool is_cut = of_block < tasks && !parts.is_whole();  // a whole job has been stored
    float4 sums[4] = {};
    if (is_cut && four * 32 < PatchesOfGroup<K>(job, thread / 128).count * K::kPatch) {
      const int count = parts.last - parts.first + 1;
      const int begin = parts.first + count * run / form.runs, end = parts.first + count * (run + 1) / form.runs;
      add_parts(g, shares, begin, end, begin == parts.first, thread, four, sums);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) of_run[i][index] = sums[i];
    __syncthreads();
    if (is_cut && run == 0) {
      for (int other = 1; other < form.runs; ++other) {
#pragma unroll
        for (int i = 0; i < 4; ++i) add_to(sums[i], of_run[i][index + other * form.threads]);
      }
      const auto sum = [&](int j, int i) {
        return i == 0 ? sums[j].x : i == 1 ? sums[j].y : i == 2 ? sums[j].z : sums[j].w;
      };
      const FourSums to(PlaceOfSums<K>(g, job, thread), four);
      store_four<typename K::Element>(g.target, to, sum);
      if (g.gate_parts != nullptr) leave_gates_of_four<typename K::Element>(g, to, sum);
    }
    __syncthreads();
  }
}

// A warp has a gate: a lane adds parts in their order, then the lanes are added.
__global__ void __launch_bounds__(256) wgrad_wgmma_gates(const __grid_constant__ Args g, int32_t gates) {
  ptx::griddepcontrol_wait();
  const int columns = 1 << (g.block_shift - 3), parts = g.gate_blocks * columns * max(columns / 2, 1);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (auto id = static_cast<int32_t>((blockIdx.x * 256 + threadIdx.x) / 32); id < gates;
       id += static_cast<int32_t>(gridDim.x * 8)) {
    float sum = 0;
    for (int i = lane; i < parts; i += 32) sum += g.gate_parts[int64_t{id} * parts + i];
    sum = sum_of_warp(sum);
    if (lane == 0) g.dgates[id] = (g.target.accumulate ? g.dgates[id] : 0) + sum;
  }
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_wgmma
