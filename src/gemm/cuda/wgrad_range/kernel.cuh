// dW[i] = gate_i dy_out^T x_in by wgmma, for hundreds of tokens and more: outputs are wgmma's rows, inputs its columns,
// tokens the depth.
//   x [n, inputs]   dy [n, outputs]   dW [blocks, b, b]   16-bit elements, sums in f32; both operands as they lie
// Who does what
//   grid      a thread block an SM. Each has an equal part of the list of blocks, and makes four at a time (b = 128:
//             one), which lie in two rows of W at most, so that they share dy
//   load      two warps fill a ring of stages, each of 64 tokens of what the blocks need, whatever job they belong to
//   compute   wgmma by two warpgroups, a job each in turn
//   finish    registers to dW, eight elements a lane, while the other warpgroup multiplies
#pragma once

#include <algorithm>

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tensor_map.h"
#include "gemm/cuda/wgrad_range/feed.cuh"
#include "gemm/cuda/wgrad_range/store.cuh"

namespace blocksparse::gemm::wgrad_range {
namespace {

// ---- Device ---------------------------------------------------------------------------------------------------------

// One stage: four products of [64, 64], or of [64, 128] two. What a job has not is done as the last that it has, and
// not stored: products that may be left out would have to wait for one another.
template <class K>
__device__ inline void multiply_stage(uint32_t stage, const Job& job, Sums& sums) {
  constexpr int kStep = K::kWidth * 2;  // 16 tokens, in units of 16 bytes
  const auto box = [&](int i) {
    return ptx::wgmma_matrix(stage + static_cast<uint32_t>(i * K::kBox), K::kBox, 8 * 128, ptx::Swizzle::bytes_128);
  };
  ptx::wgmma_fence();
  if constexpr (K::block == 64) {
    uint64_t dy[4], x[4];
#pragma unroll
    for (int b = 0; b < 4; ++b)
      dy[b] = box(b < job.second ? 0 : job.rows - 1), x[b] = box(job.rows + min(b, job.count - 1));
#pragma unroll
    for (int k = 0; k < K::kTokens / 16; ++k) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        ptx::wgmma<typename K::Element, 64, true, true>(sums[b], dy[b] + k * kStep, x[b] + k * kStep);
      }
    }
  } else {
    const uint64_t x = box(K::kDyBoxes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      auto& sum = *reinterpret_cast<float(*)[64]>(&sums[2 * half]);
#pragma unroll
      for (int k = 0; k < K::kTokens / 16; ++k) {
        ptx::wgmma<typename K::Element, 128, true, true>(sum, box(half) + k * kStep, x + k * kStep);
      }
    }
  }
  ptx::wgmma_commit();
}

// A warpgroup that multiplies: every other job of this thread block.
template <class K>
__device__ void consume(const typename K::KernelArgs& g, Shared<K>& shared, uint32_t data, int warpgroup) {
  constexpr int kTurn = 1;  // named barriers: kTurn + whose turn it is
  const int steps = g.steps.all();
  Jobs<K> jobs(g);
  cuda::RingPlace place, before;
  for (int turn = 0; jobs.more(); ++turn) {
    const Job job = jobs.next();
    if (turn % 2 != warpgroup) {
      place.skip(steps, K::kStages);
      continue;
    }
    // Who is laps behind would take the barrier of a stage for that of two laps before: jobs are begun in turn.
    if (turn > 0) ptx::bar_sync(kTurn + warpgroup, 256);
    Sums sums{};
    // The zeros are there now: ptxas else moves them between the products, and lets each wait for the one in front.
#pragma unroll
    for (auto& product : sums) {
#pragma unroll
      for (float& sum : product) ptx::hold(sum);
    }
    // A stage is given back when the next one is on its way through the tensor cores.
    for (int i = 0; i < steps; ++i) {
      shared.ring.wait_full(place);
      multiply_stage<K>(place.in(data, K::kStageBytes), job, sums);
      ptx::wgmma_wait<1>();
      if (i > 0) shared.ring.release_warp(before);
      before = place;
      place.advance(K::kStages);
    }
    if (jobs.more()) ptx::bar_arrive(kTurn + (warpgroup ^ 1), 256);
    ptx::wgmma_wait<0>();
    shared.ring.release_warp(before);
    store<K>(g, job, sums);
  }
}

template <class K>
__global__ void __launch_bounds__(K::kThreads, 1)
    wgrad_range_sums([[maybe_unused]] const __grid_constant__ typename K::KernelArgs g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ Shared<K> shared;
  const uint32_t data = shared_address(staged);
  if (threadIdx.x == 0) {
    shared.ring.init(K::kStages, 4);
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x >= 256 && threadIdx.x < 256 + 32 * K::kFeeders && threadIdx.x % 32 == 0) {
    ptx::prefetch_map(&g.dy[0]);
    ptx::prefetch_map(&g.x[0]);
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  if (warpgroup == 2) {
    ptx::setmaxnreg_dec<K::kFeedRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    if (warp < K::kFeeders) Feeder<K>(g, shared, data, warp).run();
    return;
  }
  ptx::setmaxnreg_inc<K::kRegisters>();
  consume<K>(g, shared, data, warpgroup);
#endif
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <class K>
Status map_of(const Activations& a, CUtensorMap& map) {
  return cuda::make_tensor_map({.data = a.data,
                                .columns = a.features,
                                .rows = a.n,
                                .row_stride = a.token_stride,
                                .box_columns = static_cast<uint32_t>(K::kWidth),
                                .box_rows = static_cast<uint32_t>(K::kTokens)},
                               map);
}

template <class T, int Terms, class Body>
Status with_kernel(int32_t block, Body body) {
  return block == 64 ? body.template operator()<Kernel<T, 64, Terms>>()
                     : body.template operator()<Kernel<T, 128, Terms>>();
}

template <class T, int Terms>
Status launch_of(const WeightGradient& g, const CudaCall& call) {
  return with_kernel<T, Terms>(call.problem.block, [&]<class K>() {
    typename K::KernelArgs args{.x = {},
                                .dy = {},
                                .steps = {},
                                .refs = walk_on_device(g.layout, false).refs,
                                .out_of = out_of_on_device(g.layout),
                                .target = target_of(g),
                                .blocks = static_cast<int32_t>(g.layout.blocks),
                                .outputs = call.problem.outputs,
                                .inputs = call.problem.inputs};
    if (args.blocks == 0) return Status();
    for (size_t i = 0; i < g.pairs.size(); ++i) {
      const GradTerm term = g.term(i);
      if (term.x.n == 0) continue;  // a map of nothing is refused
      const int at = args.steps.terms++;
      BS_RETURN_IF_ERROR(map_of<K>(term.x, args.x[at]));
      BS_RETURN_IF_ERROR(map_of<K>(term.dy, args.dy[at]));
      args.steps.ends[at] =
          (at == 0 ? 0 : args.steps.ends[at - 1]) + static_cast<int32_t>(ceil_div(term.x.n, K::kTokens));
    }
    return cuda::launch({.blocks = std::min<int64_t>(args.blocks, call.card.multiprocessors),
                         .threads = K::kThreads,
                         .shared_bytes = K::kSharedBytes,
                         .stream = stream_of(call)},
                        wgrad_range_sums<K>, args);
  });
}

template <class T>
Status launch(const WeightGradient& g, const CudaCall& call) {
  return g.pairs.size() > 1 ? launch_of<T, wgrad_wgmma::kTermsOfLaunch>(g, call) : launch_of<T, 1>(g, call);
}

template <class T, int Terms>
Status prepare_of() {
  for (int32_t block : {64, 128}) {
    BS_RETURN_IF_ERROR((with_kernel<T, Terms>(
        block, [&]<class K>() { return cuda::prepare_for_many(wgrad_range_sums<K>, K::kSharedBytes); })));
  }
  return cuda::prepare_tensor_maps();
}

template <class T>
Status prepare() {
  BS_RETURN_IF_ERROR((prepare_of<T, 1>()));
  return prepare_of<T, wgrad_wgmma::kTermsOfLaunch>();
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_range
