// dW[i] = gate_i dy_out^T x_in by wgmma for some hundred tokens at most: outputs are wgmma's rows, inputs its columns,
// tokens the depth.
//   x [n, inputs]   dy [n, outputs]   dW [blocks, b, b]   16-bit elements, sums in f32; both operands as they lie
// Who does what
//   grid      a thread block takes neighbours of the list, once: b = 64 two in the order of rows, which share dy unless
//             a row ends there; b = 128 64 outputs of one
//   load      a warp fills a ring of stages, each of 64 tokens of what the blocks need
//   compute   wgmma by a warpgroup
//   finish    registers to dW, eight elements a lane
#pragma once

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tensor_map.h"
#include "gemm/cuda/wgrad_block/feed.cuh"
#include "gemm/cuda/wgrad_block/store.cuh"

namespace blocksparse::gemm::wgrad_block {
namespace {

// ---- Device ---------------------------------------------------------------------------------------------------------

template <class K, int Half>
__device__ inline void add_product(float (&sums)[Half], uint32_t dy, uint32_t x) {
  constexpr int kStep = K::kWidth * 2;  // 16 tokens, in units of 16 bytes
  const uint64_t a = ptx::wgmma_matrix(dy, K::kBox, 8 * 128, ptx::Swizzle::bytes_128);
  const uint64_t b = ptx::wgmma_matrix(x, K::kBox, 8 * 128, ptx::Swizzle::bytes_128);
#pragma unroll
  for (int k = 0; k < K::kTokens / 16; ++k) {
    ptx::wgmma<typename K::Element, 2 * Half, true, true>(sums, a + k * kStep, b + k * kStep);
  }
}

// Shared: one product of [64, 128]; else two of [64, 64], each with a dy of its own.
template <class K, bool Shared>
__device__ void multiply_and_store(const Args& g, const Job<K>& job, cuda::Ring<K::kMostStages>& ring, uint32_t data) {
  constexpr int kProducts = Shared ? 1 : 2, kColumns = 128 / kProducts;
  float sums[kProducts][kColumns / 2] = {};
  // The zeros are there now: ptxas else moves them between the products, and lets each wait for the one in front.
#pragma unroll
  for (auto& product : sums) {
#pragma unroll
    for (float& sum : product) ptx::hold(sum);
  }
  const Loader<K> loader(g, job);
  const int bytes = loader.boxes() * K::kBox;
  cuda::RingPlace place, before;
  for (int i = 0; i < g.steps; ++i) {
    ring.wait_full(place);
    const uint32_t dy = place.in(data, bytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kProducts; ++k) {
      add_product<K>(sums[k], dy + static_cast<uint32_t>(k * K::kBox),
                     dy + static_cast<uint32_t>((kProducts + k) * K::kBox));
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (i > 0) ring.release_warp(before);
    before = place;
    place.advance(loader.stages());
  }
  ptx::wgmma_wait<0>();
  Sums flat;
#pragma unroll
  for (int i = 0; i < kSums; ++i) flat[i] = sums[i / (kColumns / 2)][i % (kColumns / 2)];
  store<K>(g, job, flat);
}

template <class K>
__global__ void __launch_bounds__(K::kThreads, K::kResident)
    wgrad_block_sums([[maybe_unused]] const __grid_constant__ Args g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ cuda::Ring<K::kMostStages> ring;
  const uint32_t data = shared_address(staged);
  if (threadIdx.x == 0) {
    ring.init(K::kMostStages, 4);
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x == 128) {
    ptx::prefetch_map(&g.x);
    ptx::prefetch_map(&g.dy);
  }
  const Job<K> job(g);
  __syncthreads();
  if (threadIdx.x >= 128) {
    if (threadIdx.x % 32 == 0) Loader<K>(g, job).run(ring, data);
    return;
  }
  if (job.same) multiply_and_store<K, true>(g, job, ring, data);
  else multiply_and_store<K, false>(g, job, ring, data);
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

template <class T, class Body>
Status with_kernel(int32_t block, Body body) {
  return block == 64 ? body.template operator()<Kernel<T, 64>>() : body.template operator()<Kernel<T, 128>>();
}

template <class T>
Status launch(const WeightGradient& g, const CudaCall& call) {
  return with_kernel<T>(call.problem.block, [&]<class K>() {
    const GradTerm term = g.term(0);
    Args args{.x = {},
              .dy = {},
              .refs = walk_on_device(g.layout, false).refs,
              .out_of = out_of_on_device(g.layout),
              .target = target_of(g),
              .blocks = static_cast<int32_t>(g.layout.blocks),
              .steps = static_cast<int32_t>(ceil_div(term.x.n, K::kTokens)),
              .outputs = call.problem.outputs,
              .inputs = call.problem.inputs};
    if (args.blocks == 0) return Status();
    BS_RETURN_IF_ERROR(map_of<K>(term.x, args.x));
    BS_RETURN_IF_ERROR(map_of<K>(term.dy, args.dy));
    return cuda::launch({.blocks = ceil_div(args.blocks, K::kBlocks) * K::kParts,
                         .threads = K::kThreads,
                         .shared_bytes = K::kSharedBytes,
                         .stream = stream_of(call)},
                        wgrad_block_sums<K>, args);
  });
}

template <class T>
Status prepare() {
  for (const int32_t block : {64, 128}) {
    BS_RETURN_IF_ERROR(
        with_kernel<T>(block, [&]<class K>() { return cuda::prepare_for_many(wgrad_block_sums<K>, K::kSharedBytes); }));
  }
  return cuda::prepare_tensor_maps();
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_block
