// The kernels of wgrad of up to 3 x 3 taps: see gradient.cuh.
#pragma once

#include "cuda/ring.h"
#include "gemm/cuda/wgrad_wgmma/kernel.cuh"
#include "ops/conv/cuda/halo/jobs.cuh"

namespace blocksparse::conv {
namespace {

using ptx::shared_address;

struct HaloGradient {
  HaloPatches patches;
  HaloTables tables;
  gemm::GradientTarget target;
  int64_t outputs, inputs;
  int32_t tap_rows;
  gemm::wgmma::ImageSteps pixels;  // of x
  int32_t row_step;                // positions between rows of taps
  int32_t column_step;             // positions between taps of a row
  int32_t x_bytes;                 // of a box
  int32_t patch_bytes, stage_bytes, stages;
};

struct HaloGradientMaps {
  CUtensorMap x, dy;
};

// B = 32 serves smaller blocks too, and B = 64 larger ones. Taps are those of a row.
template <class T, int B, int Taps>
struct HaloGradientKernel {
  using Element = T;
  static constexpr HaloGradientForm form = halo_gradient_form(B);
  static constexpr int kTokens = kHaloGradientTokens, kTaps = Taps;
  static constexpr int kPatch = form.patch_inputs, kPatches = form.most_patches, kColumns = Taps * kPatch;
  static constexpr int kEights = kColumns / 8, kSums = kColumns / 2;  // of a patch
  static constexpr int kAllSums = kPatches * kSums;
  static constexpr int kDyBytes = kTokens * 64 * 2;
  static constexpr int kMostThreads = (kMostHaloTapRows + 1) * 128, kRegisters = 152, kFeedRegisters = 56;
  static constexpr ptx::Swizzle swizzle = kPatch == 64 ? ptx::Swizzle::bytes_128 : ptx::Swizzle::bytes_64;
  using Sums = float[kPatches][kSums];  // [64, taps x inputs of a patch] of a warpgroup
  static_assert(kAllSums == Taps * kHaloSumsOfTap);
};

using HaloRing = cuda::Ring<kMostHaloStages>;

// The producer warp: a lane has a box, dy first, then x of each patch.
template <class K>
__device__ void feed_halo(const HaloGradient& h, const HaloGradientMaps& maps, const HaloJobs& jobs,
                          const HaloRing& ring, uint32_t stages) {
  const auto lane = static_cast<int>(threadIdx.x) % 32, patch = lane - 1;
  cuda::RingPlace place;
  for (HaloWork work(jobs, h.patches); work.next();) {
    const HaloJob job = jobs.job(h.patches, work.job);
    const int chunk = job.chunk[patch == 1];
    for (int step = work.first; step < work.last; ++step) {
      if (lane == 0) {
        ring.wait_empty(place);
        ring.expect(place, static_cast<uint32_t>(K::kDyBytes + job.patches * h.x_bytes));
      }
      __syncwarp();
      const uint32_t dy = place.in(stages, h.stage_bytes);
      const gemm::wgmma::ImagePixel at = h.pixels.pixel_of(step * K::kTokens);
      if (patch < 0) {
        ptx::load_image_box(dy, &maps.dy, ring.full(place), job.strip * 64, at.column - h.pixels.first[0],
                            at.row - h.pixels.first[1], at.image, 0, 0);
      } else if (patch < job.patches) {
        ptx::load_image_box(dy + K::kDyBytes + patch * h.patch_bytes, &maps.x, ring.full(place), chunk * K::kPatch,
                            at.column, at.row, at.image, 0, 0);
      }
      place.advance(h.stages);
    }
  }
}

// A warpgroup has a row of taps, which are columns of one product. A tap further on in x is a tap further on
// in shared memory, so the taps differ only in where their columns begin.
template <class K, int Patches>
__device__ void add_halo_steps(typename K::Sums& sums, const HaloGradient& h, const HaloRing& ring,
                               cuda::RingPlace& place, uint32_t stages, int steps, int group) {
  constexpr int kRow = K::kPatch * 2;  // bytes of a position
  const auto row = static_cast<uint32_t>(group * h.row_step * kRow);
  const auto lead = static_cast<uint32_t>(h.column_step * kRow);
  const bool arrives = threadIdx.x % 32 == 0;
  uint32_t previous = 0;
  for (int i = 0; i < steps; ++i) {
    ring.wait_full(place);
    const uint32_t dy = place.in(stages, h.stage_bytes), x = dy + K::kDyBytes + row;
    const uint64_t a = ptx::wgmma_matrix(dy, 0, 1024, ptx::Swizzle::bytes_128);
    const uint64_t b = ptx::wgmma_matrix(x, lead, 8 * kRow, K::swizzle);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < K::kTokens / 16; ++k) {
#pragma unroll
      for (int patch = 0; patch < Patches; ++patch) {
        ptx::wgmma<typename K::Element, K::kColumns, true, true>(
            sums[patch], a + k * 128, b + static_cast<uint64_t>(k * kRow + patch * (h.patch_bytes >> 4)));
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    __syncwarp();
    if (previous != 0) ptx::mbarrier_arrive(previous);
    previous = arrives ? ring.empty(place) : 0;
    place.advance(h.stages);
  }
  ptx::wgmma_wait<0>();
  __syncwarp();
  if (previous != 0) ptx::mbarrier_arrive(previous);
}

// Stores 8 columns of a warpgroup's sums: those from 8 `eight` on of a patch. sums(i) are this lane's four, ids are
// those of block_of_job().
template <class K, class Sums>
__device__ void store_halo(const HaloGradient& h, const HaloJob& job, const int32_t* ids, int group, int patch,
                           int eight, Sums sums) {
  const int shift = h.patches.block_shift, in_block = (1 << shift) - 1, id_columns = max(1, K::kPatch >> shift);
  const auto thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4, column = eight * 8 % K::kPatch + lane % 4 * 2;
  const int tap = group * K::kTaps + eight * 8 / K::kPatch;
  const int64_t input = int64_t{job.chunk[patch]} * K::kPatch + column;
  const int inside_inputs = static_cast<int>(min(max(h.inputs - input, int64_t{0}), int64_t{2}));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + 8 * half;
    const int32_t id = ids[(patch * max(1, 64 >> shift) + (r >> shift)) * id_columns + (column >> shift)];
    if (id < 0) continue;
    const int64_t output = int64_t{job.strip} * 64 + r;
    const int64_t at =
        (((int64_t{id} * (h.tap_rows * K::kTaps) + tap) << shift) + (output & in_block) << shift) + (input & in_block);
    h.target.template store_pair<typename K::Element>(id, at, output < h.outputs ? inside_inputs : 0,
                                                      {sums(2 * half), sums(2 * half + 1)});
  }
}

template <class K>
__device__ float* halo_part_of(const HaloGradient& h, int thread_block, bool from_start, int group) {
  const int64_t part = (2 * int64_t{thread_block} + from_start) * h.tap_rows + group;
  return h.tables.parts + part * (K::kAllSums * 128) + threadIdx.x % 128;
}

// A job that a thread block has alone. The threads that multiply find its blocks before its sums take the registers.
struct HaloWhole {
  HaloJob job;
  int32_t ids[kHaloIds];
};

template <class K>
__device__ void find_whole(HaloWhole& whole, const HaloJob& job, const HaloPatches& patches, int threads) {
  const auto thread = static_cast<int>(threadIdx.x);
  ptx::bar_sync(1, threads);
  if (thread == 0) whole.job = job;
  if (thread < kHaloIds) whole.ids[thread] = block_of_job<K>(patches, job, thread);
  ptx::bar_sync(1, threads);
}

template <class K>
__device__ void finish_halo(const HaloGradient& h, const HaloWork& work, const HaloWhole& whole, int group,
                            const typename K::Sums& sums) {
  if (!work.is_whole()) {
    float* part = halo_part_of<K>(h, static_cast<int>(blockIdx.x), work.first == 0, group);
#pragma unroll
    for (int i = 0; i < K::kAllSums; ++i) part[i * 128] = sums[i / K::kSums][i % K::kSums];
    return;
  }
#pragma unroll
  for (int patch = 0; patch < K::kPatches; ++patch) {
    if (patch >= whole.job.patches) continue;
#pragma unroll
    for (int j = 0; j < K::kEights; ++j) {
      store_halo<K>(h, whole.job, whole.ids, group, patch, j, [&](int i) { return sums[patch][4 * j + i]; });
    }
  }
}

template <class K>
__global__ void __launch_bounds__(K::kMostThreads, 1)
    halo_gradient([[maybe_unused]] const __grid_constant__ HaloGradientMaps maps,
                  [[maybe_unused]] const __grid_constant__ HaloGradient h) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ HaloRing ring;
  __shared__ HaloJobs jobs;
  __shared__ HaloWhole whole;
  const int group = static_cast<int>(threadIdx.x) / 128;
  const uint32_t stages = shared_address(staged);
  if (threadIdx.x == 0) {
    ring.init(h.stages, h.tap_rows * 4);
    ptx::fence_mbarrier_init();
    ptx::prefetch_map(&maps.x);
    ptx::prefetch_map(&maps.dy);
  }
  ptx::griddepcontrol_wait();
  find_jobs<K>(jobs, h.patches);
  if (static_cast<int>(blockIdx.x) >= jobs.grid) return;
  if (group == h.tap_rows) {
    ptx::setmaxnreg_dec<K::kFeedRegisters>();
    const int thread = static_cast<int>(threadIdx.x) - h.tap_rows * 128 - 32;
    if (thread < 0) feed_halo<K>(h, maps, jobs, ring, stages);
    else leave_tables<K>(h.tables, jobs, h.patches, thread);
    return;
  }
  ptx::setmaxnreg_inc<K::kRegisters>();
  cuda::RingPlace place;
  for (HaloWork work(jobs, h.patches); work.next();) {
    const HaloJob job = jobs.job(h.patches, work.job);
    if (work.is_whole()) find_whole<K>(whole, job, h.patches, h.tap_rows * 128);
    typename K::Sums sums = {};
    const int patches = __shfl_sync(~0u, job.patches, 0), steps = work.last - work.first;
    if (patches == K::kPatches) add_halo_steps<K, K::kPatches>(sums, h, ring, place, stages, steps, group);
    else add_halo_steps<K, 1>(sums, h, ring, place, stages, steps, group);
    finish_halo<K>(h, work, whole, group, sums);
  }
#endif
}

// The thread blocks that finish a job together: each has 8 columns of a warpgroup's sums, and adds runs of parts side
// by side. With 24 thread blocks for all warpgroups and one run it took 10 to 13 us (3 x 3, two jobs, 132 parts).
constexpr int kHaloRuns = 4;
template <class K>
__host__ __device__ constexpr int halo_slices(int tap_rows) {
  return tap_rows * (K::kAllSums / 4);
}

// Finishes jobs that several thread blocks shared: it adds the parts of a run in the order of positions, then the runs.
template <class K>
__global__ void __launch_bounds__(kHaloRuns * 128) halo_combine(const __grid_constant__ HaloGradient h) {
  ptx::griddepcontrol_wait();
  const int4 counts = *h.tables.counts;
  const int slices = halo_slices<K>(h.tap_rows);
  const int index = static_cast<int>(blockIdx.x) / slices, slice = static_cast<int>(blockIdx.x) % slices;
  if (counts.y + index >= counts.x) return;
  __shared__ gemm::wgrad_wgmma::Share shares[gemm::wgrad_wgmma::kMostGrid + 1];
  __shared__ float of_run[kHaloRuns][4][128];
  const auto thread = static_cast<int>(threadIdx.x), run = thread / 128;
  const int group = slice / (K::kAllSums / 4), eight = slice % (K::kAllSums / 4), grid = counts.z;
  const int4 of_job = h.tables.jobs[index];
  const HaloJob job{of_job.x, of_job.y, {of_job.z, of_job.w}};
  if (eight / K::kEights >= job.patches) return;
  if (thread <= grid) shares[thread] = h.tables.shares[thread];
  __syncthreads();
  const auto [first, last] = gemm::wgrad_wgmma::parts_of(shares, grid, counts.y + index);
  if (first == last) return;  // a whole job has been stored
  const int count = last - first + 1, end = first + count * (run + 1) / kHaloRuns;
  constexpr int kAtOnce = 8;
  float sums[4] = {};
  for (int c = first + count * run / kHaloRuns; c < end; c += kAtOnce) {
    float more[kAtOnce][4];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = min(c + j, end - 1);
      const bool has_step = shares[at].job != shares[at + 1].job || shares[at].step != shares[at + 1].step;
      const float* part = halo_part_of<K>(h, at, at == first, group) + eight * 4 * 128;
#pragma unroll
      for (int i = 0; i < 4; ++i) more[j][i] = c + j < end && has_step ? part[i * 128] : 0;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += more[j][i];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) of_run[run][i][thread % 128] = sums[i];
  __syncthreads();
  if (run > 0) return;
  for (int other = 1; other < kHaloRuns; ++other) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += of_run[other][i][thread];
  }
  store_halo<K>(h, job, h.tables.ids + index * kHaloIds, group, eight / K::kEights, eight % K::kEights,
                [&](int i) { return sums[i]; });
}

}  // namespace
}  // namespace blocksparse::conv
