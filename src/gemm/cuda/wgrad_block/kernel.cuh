// dW[i] = gate_i dy_out^T x_in by wgmma: outputs are wgmma's rows, inputs its columns, tokens the depth.
//   x [n, inputs]   dy [n, outputs]   dW [blocks, b, b]   16-bit elements, sums in f32; both operands as they lie
// Who does what
//   grid      a thread block of one warpgroup for each block of dW, or for two that share dy; several on an SM
//   load      into a ring of stages: all threads by cp.async, or its first one by TMA
//   compute   wgmma by the warpgroup: 64 x b for each 64 rows
//   finish    registers to shared memory to dW
#pragma once

#include <algorithm>

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tensor_map.h"
#include "gemm/cuda/wgrad_block/store.cuh"

namespace blocksparse::gemm::wgrad_block {
namespace {

// ---- Device ---------------------------------------------------------------------------------------------------------

// `second_dy`: the box with dy of the second block or, with one block, of its lower half. The first stage begins the
// sums.
template <class S>
__device__ inline void multiply(Sums<S>& sums, uint32_t stage, int second_dy, bool is_first) {
  constexpr int kStep = S::kWidth * 2;  // 16 tokens, in units of 16 bytes
  const auto boxes = [&](int i) {
    return ptx::wgmma_matrix(stage + static_cast<uint32_t>(i * S::kBox), S::kBox, 8 * 128, ptx::Swizzle::bytes_128);
  };
  uint64_t dy[S::kProducts], x[S::kProducts];
#pragma unroll
  for (int i = 0; i < S::kProducts; ++i) dy[i] = boxes(i * second_dy), x[i] = boxes(S::kHalves + i / S::kHalves);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < S::kTokens / 16; ++k) {
#pragma unroll
    for (int i = 0; i < S::kProducts; ++i) {
      ptx::wgmma<typename S::Element, S::block, true, true>(sums[i], dy[i] + k * kStep, x[i] + k * kStep,
                                                            k > 0 || !is_first);
    }
  }
  ptx::wgmma_commit();
}

template <class S, int Terms>
__global__ void __launch_bounds__(S::kThreads, S::kResident)
    wgrad_block_ring([[maybe_unused]] const __grid_constant__ RingArgs<Terms> g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ cuda::Ring<kStages> ring;
  const uint32_t data = shared_address(staged);
  const Place<S> place(g);
  const int boxes = S::kBoxes - (place.shares_dy() ? 1 : 0), second_dy = place.shares_dy() ? 0 : S::kBoxes / 2 + 1;
  RingLoader<S, Terms> loader(g, place, boxes, ring, data);
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&g.dy[0]);
    ptx::prefetch_map(&g.x[0]);
    ring.init(g.stages, 1);
    ptx::fence_mbarrier_init();
    for (int i = 0; i + 2 < g.stages; ++i) loader.next();
  }
  __syncthreads();
  Sums<S> sums;
  cuda::RingPlace stage;
  const int steps = g.steps.all();
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    ring.wait_full(stage);
    // Every warp has completed the products of two steps ago. Their stage is filled next.
    __syncthreads();
    if (threadIdx.x == 0) loader.next();
    __syncwarp();
    multiply<S>(sums, stage.in(data, boxes * S::kBox), S::kBlocks == 2 ? second_dy : 1, i == 0);
    ptx::wgmma_wait<1>();
    stage.advance(g.stages);
  }
  ptx::wgmma_wait<0>();
  __syncthreads();
  store<S>(g, place, sums, data);
#endif
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kResident)
    wgrad_block_copies([[maybe_unused]] const __grid_constant__ CopyArgs g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  const uint32_t data = shared_address(staged);
  const Place<S> place(g);
  CopyLoader<S> loader(g, place, data);
#pragma unroll 1
  for (int i = 0; i < kStages - 2; ++i) loader.next();
  Sums<S> sums;
  int stage = 0;
  const int steps = (static_cast<int>(g.x.n) + S::kTokens - 1) / S::kTokens;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    ptx::cp_async_wait<kStages - 3>();
    ptx::fence_async_shared();
    // Every warp has completed the products of two steps ago. Their stage is filled next.
    __syncthreads();
    multiply<S>(sums, data + static_cast<uint32_t>(stage * S::kBoxes * S::kBox), 1, i == 0);
    loader.next();
    ptx::wgmma_wait<1>();
    if (++stage == kStages) stage = 0;
  }
  ptx::wgmma_wait<0>();
  __syncthreads();
  store<S>(g, place, sums, data);
#endif
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <class S>
Status map_of(const Activations& a, CUtensorMap& map) {
  return cuda::make_tensor_map({.data = a.data,
                                .columns = a.features,
                                .rows = a.n,
                                .row_stride = a.token_stride,
                                .box_columns = static_cast<uint32_t>(S::kWidth),
                                .box_rows = static_cast<uint32_t>(S::kTokens)},
                               map);
}

Common common_of(const WeightGradient& g, const CudaCall& call) {
  return {.blocks = static_cast<int32_t>(g.layout.blocks),
          .refs = walk_on_device(g.layout, false).refs,
          .out_of = out_of_on_device(g.layout),
          .target = target_of(g),
          .outputs = call.problem.outputs,
          .inputs = call.problem.inputs};
}

template <class S>
cuda::Launch launch_of(const WeightGradient& g, const CudaCall& call, int64_t stages) {
  return {.blocks = ceil_div(g.layout.blocks, S::kBlocks),
          .threads = S::kThreads,
          .shared_bytes = static_cast<int>(std::max<int64_t>(stages * S::kBoxes * S::kBox, kStoreBytes<S>)),
          .stream = stream_of(call)};
}

template <class S, int Terms>
Status launch_ring(const WeightGradient& g, const CudaCall& call, int32_t stages) {
  RingArgs<Terms> args{common_of(g, call), {}, {}, {}, stages};
  for (size_t i = 0; i < g.pairs.size(); ++i) {
    const GradTerm term = g.term(i);
    if (term.x.n == 0) continue;  // a map of nothing is refused
    const int at = args.steps.terms++;
    BS_RETURN_IF_ERROR(map_of<S>(term.x, args.x[at]));
    BS_RETURN_IF_ERROR(map_of<S>(term.dy, args.dy[at]));
    args.steps.ends[at] =
        (at == 0 ? 0 : args.steps.ends[at - 1]) + static_cast<int32_t>(ceil_div(term.x.n, S::kTokens));
  }
  return cuda::launch(launch_of<S>(g, call, stages), wgrad_block_ring<S, Terms>, args);
}

template <class T, int Tokens, class Body>
Status with_shape(int32_t block, Body body) {
  return block == 64 ? body.template operator()<Shape<T, 64, Tokens, 1>>()
                     : body.template operator()<Shape<T, 128, Tokens, 1>>();
}

// Two blocks of dW at a time were measured of one (x, dy), with a dW that store_narrow stores. All else is made block
// by block.
bool two_at_a_time(const Ring& ring, const WeightGradient& g, const CudaProblem& p) {
  const bool narrow = g.dw_dtype != DType::f32 && !g.accumulate && g.gates == nullptr;
  const bool aligned = reinterpret_cast<uintptr_t>(g.dw) % 16 == 0;
  const bool whole = p.outputs % p.block == 0 && p.inputs % p.block == 0;
  return ring.blocks == 2 && g.pairs.size() == 1 && narrow && aligned && whole;
}

template <class T>
Status launch(const WeightGradient& g, const CudaCall& call) {
  if (g.layout.blocks == 0) return Status();
  const int32_t block = call.problem.block;
  const Ring ring = ring_of(call.problem, call.card);
  if (copies(call.problem, call.card)) {
    const auto launch = [&]<class S>() {
      const GradTerm term = g.term(0);
      const CopyArgs args{common_of(g, call), term.x, term.dy};
      const int64_t stages = std::min<int64_t>(ceil_div(term.x.n, S::kTokens), kStages);
      return cuda::launch(launch_of<S>(g, call, stages), wgrad_block_copies<S>, args);
    };
    // Up to 64 tokens two stages of 32, whose products begin when half of the tokens are there.
    return ring.tokens == 64 && call.problem.n > 64 ? with_shape<T, 64>(block, launch)
                                                    : with_shape<T, 32>(block, launch);
  }
  const auto launch = [&]<class S>() {
    return g.pairs.size() == 1 ? launch_ring<S, 1>(g, call, ring.stages)
                               : launch_ring<S, wgrad_wgmma::kTermsOfLaunch>(g, call, ring.stages);
  };
  if (two_at_a_time(ring, g, call.problem)) return launch_ring<Shape<T, 64, 32, 2>, 1>(g, call, ring.stages);
  return ring.tokens == 64 ? with_shape<T, 64>(block, launch) : with_shape<T, 32>(block, launch);
}

template <class S>
Status prepare_shape() {
  constexpr int kBytes = std::max(kStages * S::kBoxes * S::kBox, kStoreBytes<S>);
  BS_RETURN_IF_ERROR((cuda::prepare_for_many(wgrad_block_ring<S, 1>, kBytes)));
  BS_RETURN_IF_ERROR((cuda::prepare_for_many(wgrad_block_ring<S, wgrad_wgmma::kTermsOfLaunch>, kBytes)));
  return cuda::prepare_for_many(wgrad_block_copies<S>, kBytes);
}

template <class T>
Status prepare() {
  for (const int32_t block : {64, 128}) {
    BS_RETURN_IF_ERROR((with_shape<T, 64>(block, [&]<class S>() { return prepare_shape<S>(); })));
    BS_RETURN_IF_ERROR((with_shape<T, 32>(block, [&]<class S>() { return prepare_shape<S>(); })));
  }
  using Two = Shape<T, 64, 32, 2>;
  BS_RETURN_IF_ERROR((cuda::prepare_for_many(wgrad_block_ring<Two, 1>, kStages * Two::kBoxes * Two::kBox)));
  return cuda::prepare_tensor_maps();
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_block
