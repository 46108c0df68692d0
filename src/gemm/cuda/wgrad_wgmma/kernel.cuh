// The kernels of wgrad for many tokens: see launch.cuh.
#pragma once

#include "core/ceil_div.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ring.h"
#include "cuda/tensor_map.h"
#include "gemm/cuda/wgrad_wgmma/finish.cuh"

namespace blocksparse::gemm::wgrad_wgmma {
namespace {

using ptx::shared_address;

template <class K>
using Ring = cuda::Ring<K::kMostStages>;

// The jobs and steps of a thread block, in turn: first whole jobs, then its part of the shared ones.
class Work {
 public:
  int job = 0, first = 0, last = 0;

  __device__ explicit Work(const Args& g)
      : whole_(g.tables.job_counts().y),
        steps_(g.steps),
        begin_(g.tables.share(static_cast<int>(blockIdx.x))),
        end_(g.tables.share(static_cast<int>(blockIdx.x) + 1)) {}

  __device__ bool next() {
    if (!shared_) {
      job = job_in_turn(round_++, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
      first = 0, last = steps_;
      if (job < whole_) return true;
    }
    job = shared_ ? job + 1 : begin_.job;
    shared_ = true;
    first = job == begin_.job ? begin_.step : 0;
    last = job == end_.job ? end_.step : steps_;
    return job < end_.job || (job == end_.job && end_.step > first);
  }
  __device__ bool is_whole() const { return first == 0 && last == steps_; }

 private:
  int whole_, steps_;
  Share begin_, end_;
  int round_ = 0;
  bool shared_ = false;
};

// ---- Load -----------------------------------------------------------------------------------------------------------

template <class K>
__device__ inline void load_stage_box(uint32_t to, const CUtensorMap* map, uint32_t full, int feature, int token) {
  if constexpr (K::first) ptx::load_box(to, map, full, token, feature);
  else ptx::load_box(to, map, full, feature, token);
}

inline constexpr int kFeedBarrier = 1;

// Every lane of the feeding warps has a box of each step. Copies of one warp start one after the other, so four warps
// share them. The first warp announces how many bytes a stage awaits; bytes may arrive before that. A stage is filled
// when each warp with a box has found it empty. A warp without a box could be a whole ring late, and await a phase that
// is over: it leaves out the job, and all warps meet behind the job. Were all to arrive at every stage, b = 64 would
// take 107 us instead of 88 (density .25, 4096 x 4096, 4096 tokens).
template <class K>
__device__ void feed(const Args& g, const typename K::Maps& maps, const Ring<K>& ring, uint32_t stages) {
  const auto thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  const int index = thread / 32 + lane * K::kFeeders, box = index - K::kDyBoxes;
  cuda::RingPlace place;
  for (Work work(g); work.next();) {
    const Job job = g.tables.jobs[work.job];
    const int column = box < 0             ? job.strip * K::form.strip_outputs + index * 64
                       : box < job.patches ? g.tables.chunks[job.first_patch + box] * K::kPatch
                                           : 0;
    [[maybe_unused]] wgmma::ImageTap tap{};
    if constexpr (K::order == wgmma::XOrder::images) tap = maps.x[0].taps.tap_of(column);
    const bool has_box = thread / 32 - K::kDyBoxes < job.patches;
    if (!has_box) place.skip(work.last - work.first, K::kStages);
    StepPlace<K::kTokens> at(maps.steps, work.first);
    for (int step = work.first; has_box && step < work.last; ++step, at.advance(maps.steps)) {
      if (lane == 0) ring.wait_empty(place);
      __syncwarp();
      const uint32_t data = place.in(stages, K::kStageBytes);
      // `term` is equal in all lanes, which the compiler does not see otherwise: it would compute addresses for each
      // lane.
      const int term = K::kTerms == 1 ? 0 : __shfl_sync(~0u, at.term, 0);
      if (box < 0) {
        load_stage_box<K>(data + index * K::kDyBox, maps.dy + term, ring.full(place), column, at.token);
      } else if (box < job.patches) {
        const uint32_t to = data + K::kDyBoxes * K::kDyBox + box * K::kXBox;
        if constexpr (K::order == wgmma::XOrder::images) {
          const auto& x = maps.x[0];
          wgmma::load_positions(to, &x.map, ring.full(place), x.steps.deep, tap, x.steps.pixel_of(at.token));
        } else {
          load_stage_box<K>(to, &maps.x[term].map, ring.full(place), column, at.token);
        }
      }
      if (thread == 0) {
        ring.expect(place, static_cast<uint32_t>(K::kDyBoxes * K::kDyBox + job.patches * K::kXBox));
      }
      place.advance(K::kStages);
    }
    ptx::bar_sync(kFeedBarrier, 32 * K::kFeeders);
  }
}

// ---- Compute --------------------------------------------------------------------------------------------------------

template <class K, int N>
__device__ void add_steps(Sums& sums, const Ring<K>& ring, cuda::RingPlace& place, uint32_t stages, int steps,
                          int dy_box, int first_patch) {
  constexpr bool kTurned = !K::first;  // tokens, the depth, are rows of the boxes
  constexpr ptx::Swizzle kOfX = K::first || K::kPatch == 64 ? ptx::Swizzle::bytes_128 : ptx::Swizzle::bytes_64;
  constexpr int kStepDy = kTurned ? 128 : 2, kStepX = kTurned ? K::kPatch * 2 : 2;
  const bool arrives = threadIdx.x % 128 == 0;
  uint32_t previous = 0;
  for (int i = 0; i < steps; ++i) {
    ring.wait_full(place);
    const uint32_t data = place.in(stages, K::kStageBytes), dy = data + dy_box * K::kDyBox;
    const uint32_t x = data + K::kDyBoxes * K::kDyBox + first_patch * K::kXBox;
    const uint64_t a = ptx::wgmma_matrix(dy, K::kDyBox, 1024, ptx::Swizzle::bytes_128);
    const uint64_t b = ptx::wgmma_matrix(x, K::kXBox, kTurned ? K::kPatch * 16 : 1024, kOfX);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < K::kTokens / 16; ++k) {
      ptx::wgmma<typename K::Element, N, kTurned, kTurned>(sums, a + k * kStepDy, b + k * kStepX);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (previous != 0) ptx::mbarrier_arrive(previous);
    previous = arrives ? ring.empty(place) : 0;
    place.advance(K::kStages);
  }
  ptx::wgmma_wait<0>();
  if (previous != 0) ptx::mbarrier_arrive(previous);
}

template <class K>
__global__ void __launch_bounds__(K::kThreads, 1)
    wgrad_wgmma_sums([[maybe_unused]] const __grid_constant__ typename K::Maps maps,
                     [[maybe_unused]] const __grid_constant__ Args g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ Ring<K> ring;
  const uint32_t stages = shared_address(staged);
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (threadIdx.x == 0) {
    ring.init(K::kStages, 2);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
  if (group == 2) {
    ptx::setmaxnreg_dec<56>();
    if (threadIdx.x < 2 * 128 + 32 * K::kFeeders) feed<K>(g, maps, ring, stages);
    return;
  }
  ptx::setmaxnreg_inc<224>();
  Sums sums;
  cuda::RingPlace place;
  for (Work work(g); work.next();) {
    const Job job = g.tables.jobs[work.job];
    const PatchesOfGroup<K> patches(job, group);
    const int dy_box = K::wide ? group : 0, steps = work.last - work.first;
#pragma unroll
    for (float& sum : sums) sum = 0;
    const int quarters = __shfl_sync(~0u, ceil_div(patches.count * K::kPatch, 64), 0);
    if (quarters == 4) add_steps<K, 256>(sums, ring, place, stages, steps, dy_box, patches.first);
    else if (quarters == 3) add_steps<K, 192>(sums, ring, place, stages, steps, dy_box, patches.first);
    else if (quarters == 2) add_steps<K, 128>(sums, ring, place, stages, steps, dy_box, patches.first);
    else add_steps<K, 64>(sums, ring, place, stages, steps, dy_box, patches.first);  // also where it has no patch
    if (work.is_whole()) {
      store_job<K>(g, job, sums);
    } else {
      float4* part = part_of(g, static_cast<int>(blockIdx.x), work.first == 0, static_cast<int>(threadIdx.x));
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        if (j < 8 * quarters) part[j * 128] = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
      }
    }
  }
#endif
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_wgmma
