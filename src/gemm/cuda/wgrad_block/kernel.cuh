// dW[i] = gate_i dy_out^T x_in by wgmma, blocks of dW a thread block: outputs are wgmma's rows, inputs its columns,
// tokens the depth.
//   x [n, inputs]   dy [n, outputs]   dW [blocks, b, b]   16-bit elements, sums in f32; both operands as they lie
// Who does what
//   grid      a thread block takes neighbours of the list, once: b = 32 four blocks in the order of columns, b = 64 two
//             in the order of rows, b = 128 half of one. So they share x, or dy, unless a column or a row ends there
//   load      a warp fills a ring of stages, each of 64 tokens of what the blocks need
//   compute   wgmma by a warpgroup: b = 32 two blocks are the 64 rows of a wgmma, b = 64 the 128 columns of one
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

// Of a lane, of each product: [64, 32], [64, 64] or [64, 128]. b = 32: of blocks 0 and 1 in the upper and lower rows of
// the first, of 2 and 3 in those of the next; where not all pairs share their x, of all four with the x of each.
template <class K, bool Shared>
struct Sums {
  static constexpr int kColumns = K::block == 32 ? 32 : K::block == 64 && !Shared ? 64 : 128;
  static constexpr int kProducts = K::block == 32 ? (Shared ? 2 : 4) : K::block == 64 && !Shared ? 2 : 1;
  float of[kProducts][kColumns / 2] = {};
};

// Descriptors of boxes, in the order in which they lie: of a [64, 16] of dy, and of x.
template <class K>
__device__ inline uint64_t matrix_at(uint32_t address) {
  if constexpr (K::first) return ptx::wgmma_matrix(address, 0, 8 * 128, ptx::Swizzle::bytes_128);
  else if constexpr (K::kWidth == 32) return ptx::wgmma_matrix(address, K::kBox, 8 * 64, ptx::Swizzle::bytes_64);
  else return ptx::wgmma_matrix(address, K::kBox, 8 * 128, ptx::Swizzle::bytes_128);
}

template <class K, int Half>
__device__ inline void add_product(float (&sums)[Half], uint32_t dy, uint32_t x) {
  constexpr int kStep = K::first ? 2 : K::kWidth * 2;
  const uint64_t a = matrix_at<K>(dy), b = matrix_at<K>(x);
#pragma unroll
  for (int k = 0; k < K::kTokens / 16; ++k) {
    ptx::wgmma<typename K::Element, 2 * Half, !K::first, !K::first>(sums, a + k * kStep, b + k * kStep);
  }
}

template <class K, bool Shared>
__device__ void add_steps(const Loader<K>& loader, cuda::Ring<K::kMostStages>& ring, uint32_t data, int steps,
                          Sums<K, Shared>& sums) {
  const int boxes = loader.count(), stages = Loader<K>::stages_of(boxes), bytes = boxes * K::kBox;
  uint32_t x_of[K::kBlocks];  // from the start of a stage
#pragma unroll
  for (int r = 0; r < K::kBlocks; ++r) x_of[r] = static_cast<uint32_t>(loader.place_of(K::kDyBoxes + r) * K::kBox);
  cuda::RingPlace place, before;
  for (int i = 0; i < steps; ++i) {
    ring.wait_full(place);
    const uint32_t dy = place.in(data, bytes);
    ptx::wgmma_fence();
    if constexpr (K::block == 32) {
      constexpr int kEach = Shared ? 1 : 2;
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
          add_product<K>(sums.of[r / 2 * kEach + k], dy + r * K::kBox, dy + x_of[r + k]);
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < Sums<K, Shared>::kProducts; ++k) add_product<K>(sums.of[k], dy + k * K::kBox, dy + x_of[k]);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (i > 0) ring.release_warp(before);
    before = place;
    place.advance(stages);
  }
  ptx::wgmma_wait<0>();
}

template <class K, bool Shared>
__device__ void multiply_and_store(const typename K::KernelArgs& g, const Job<K>& job, cuda::Ring<K::kMostStages>& ring,
                                   uint32_t data) {
  Sums<K, Shared> sums;
  // The zeros are there now: ptxas else moves them between the products, and lets each wait for the one in front.
#pragma unroll
  for (auto& product : sums.of) {
#pragma unroll
    for (float& sum : product) ptx::hold(sum);
  }
  add_steps<K, Shared>(Loader<K>(g, job), ring, data, g.steps.all(), sums);
  typename Storer<K>::Flat flat;
  constexpr int kColumns = Sums<K, Shared>::kColumns / 2, kProducts = Sums<K, Shared>::kProducts;
  if constexpr (K::block == 32 && !Shared) {
    const bool lower = threadIdx.x >= 64;
#pragma unroll
    for (int i = 0; i < 32; ++i) flat[i] = lower ? sums.of[i / 16 * 2 + 1][i % 16] : sums.of[i / 16 * 2][i % 16];
  } else {
#pragma unroll
    for (int i = 0; i < kProducts * kColumns; ++i) flat[i] = sums.of[i / kColumns][i % kColumns];
  }
  Storer<K>(g, job).store(flat);
}

template <class K>
__global__ void __launch_bounds__(K::kThreads, K::kResident)
    wgrad_block_sums([[maybe_unused]] const __grid_constant__ typename K::KernelArgs g) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ cuda::Ring<K::kMostStages> ring;
  const uint32_t data = shared_address(staged);
  if (threadIdx.x == 0) {
    ring.init(K::kMostStages, 4);
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x == 128) {
    ptx::prefetch_map(&g.x[0]);
    ptx::prefetch_map(&g.dy[0]);
  }
  const Job<K> job(g);
  __syncthreads();
  if (threadIdx.x >= 128) {
    if (threadIdx.x % 32 == 0) Loader<K>(g, job).run(ring, data);
    return;
  }
  if (K::block == 128 || (job.same[K::kBlocks > 1 ? 1 : 0] && job.same[K::kBlocks - 1])) {
    multiply_and_store<K, true>(g, job, ring, data);
  } else {
    multiply_and_store<K, false>(g, job, ring, data);
  }
#endif
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <class K>
Status map_of(const Activations& a, CUtensorMap& map) {
  const bool first = a.features_first();
  return cuda::make_tensor_map({.data = a.data,
                                .columns = first ? a.n : a.features,
                                .rows = first ? a.features : a.n,
                                .row_stride = first ? a.feature_stride : a.token_stride,
                                .box_columns = static_cast<uint32_t>(first ? K::kTokens : K::kWidth),
                                .box_rows = static_cast<uint32_t>(first ? K::kWidth : K::kTokens)},
                               map);
}

template <class T, int Terms, class Body>
Status with_kernel(int32_t block, bool first, Body body) {
  const auto of_block = [&]<int Block>() {
    return first ? body.template operator()<Kernel<T, Block, true, Terms>>()
                 : body.template operator()<Kernel<T, Block, false, Terms>>();
  };
  return block == 32   ? of_block.template operator()<32>()
         : block == 64 ? of_block.template operator()<64>()
                       : of_block.template operator()<128>();
}

template <class T, int Terms>
Status launch_of(const WeightGradient& g, const CudaCall& call) {
  return with_kernel<T, Terms>(call.problem.block, call.problem.x_first, [&]<class K>() {
    typename K::KernelArgs args{.x = {},
                                .dy = {},
                                .steps = {},
                                .by_out = walk_on_device(g.layout, false),
                                .by_in = walk_on_device(g.layout, true),
                                .out_of = out_of_on_device(g.layout),
                                .target = target_of(g),
                                .w = g.w,
                                .dgates = static_cast<float*>(g.dgates),
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
    return cuda::launch({.blocks = ceil_div(args.blocks, K::kBlocks) * K::kParts,
                         .threads = K::kThreads,
                         .shared_bytes = K::kSharedBytes,
                         .stream = stream_of(call)},
                        wgrad_block_sums<K>, args);
  });
}

template <class T>
Status launch(const WeightGradient& g, const CudaCall& call) {
  return g.pairs.size() > 1 ? launch_of<T, wgrad_wgmma::kTermsOfLaunch>(g, call) : launch_of<T, 1>(g, call);
}

template <class T, int Terms>
Status prepare_of() {
  for (int32_t block : {32, 64, 128}) {
    for (bool first : {false, true}) {
      BS_RETURN_IF_ERROR((with_kernel<T, Terms>(
          block, first, [&]<class K>() { return cuda::prepare_for_many(wgrad_block_sums<K>, K::kSharedBytes); })));
    }
  }
  return cuda::prepare_tensor_maps();
}

template <class T>
Status prepare() {
  BS_RETURN_IF_ERROR((prepare_of<T, 1>()));
  return prepare_of<T, wgrad_wgmma::kTermsOfLaunch>();
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_block
