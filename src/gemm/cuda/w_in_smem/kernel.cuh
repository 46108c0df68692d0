// y = f(x W^T + bias + residual) for few features and many tokens, and dgrad likewise, b = 8, 16 and 32 on Hopper. All
// of W is in the shared memory of each thread block. Every x is read once and every y written once.
//   x [n, inputs]   w [blocks, b, b]   y [n, outputs]   16-bit elements, sums in f32
// Who does what
//   grid      a thread block an SM, which takes tile after tile of 32 or 64 tokens with all of their features
//   load      one warp fills a ring of tiles with boxes. All others copy W once, unchanged, while the first tiles
//   arrive.
//             So no kernel is needed before; those of `wgmma` take 3 us and more
//   compute   each warp has 32 tokens x 32 outputs of a tile: mma.sync, see tile.cuh
//   finish    through shared memory, while the other warps are at this tile or the next
#pragma once

#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ring.h"
#include "cuda/tensor_map.h"
#include "gemm/cuda/w_in_smem/tile.cuh"

namespace blocksparse::gemm::w_in_smem {
namespace {

inline constexpr int kThreads = kWarps * 32;

using Ring = cuda::Ring<kMostStages>;

// Called by one lane: loads the tiles of this thread block, chunk by chunk.
__device__ inline void load_tiles(const Args& p, const Ring& ring, uint32_t stages) {
  cuda::RingPlace place;
  for (auto tile = static_cast<int>(blockIdx.x); tile < p.plan.tiles; tile += static_cast<int>(gridDim.x)) {
    uint32_t to = place.in(stages, p.plan.stage_bytes);
    ring.wait_empty(place);
    ring.expect(place, static_cast<uint32_t>(p.plan.stage_bytes));
    for (int chunk = 0; chunk < p.plan.chunks; ++chunk, to += p.chunk_bytes()) {
      ptx::load_box(to, &p.x, ring.full(place), chunk * wgmma::kChunk, tile * p.plan.tokens);
    }
    place.advance(p.plan.stages);
  }
}

// Called by one warp: its warp tiles of all tiles. Strips change from tile to tile, so that each warp meets long rows
// and short ones.
template <class K>
__device__ inline void multiply_tiles(const Args& p, const Ring& ring, uint32_t stages, uint32_t staged,
                                      const Weights& w) {
  const int warp_tiles = p.plan.warp_tiles();
  const Lane lane = Lane::of<K>();
  cuda::RingPlace place;
  int warp_tile = static_cast<int>(threadIdx.x) / 32;
  for (auto tile = static_cast<int>(blockIdx.x); tile < p.plan.tiles; tile += static_cast<int>(gridDim.x)) {
    const int part = warp_tile >= p.plan.strips, strip = warp_tile - part * p.plan.strips;
    Sums sums{};
    ring.wait_full(place);
    if (warp_tile < warp_tiles) {
      const uint32_t x = place.in(stages, p.plan.stage_bytes) + part * kSide * wgmma::kChunk * 2;
      multiply_tile<K>(w, lane, x, strip, sums);
    }
    ring.release_warp(place);
    if (warp_tile < warp_tiles) {
      const int token = tile * p.plan.tokens + part * kSide;
      finish_tile<typename K::Element>(p, staged, token, strip * kSide, sums);
    }
    place.advance(p.plan.stages);
    warp_tile = (warp_tile + warp_tiles + 1) % kWarps;
  }
  if (threadIdx.x % 32 == 0) ptx::bulk_wait_read<0>();
}

template <class K>
__global__ void __launch_bounds__(kThreads + 32, 1) w_in_smem_product([[maybe_unused]] const __grid_constant__ Args p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ Ring ring;
  const uint32_t warp_tiles = ptx::shared_address(staged), stages = warp_tiles + kWarps * kTileBytes;
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&p.x);
    if (p.boxes) ptx::prefetch_map(&p.y);
    ring.init(p.plan.stages, kWarps);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (!p.early || threadIdx.x >= kThreads) ptx::griddepcontrol_wait();
  if (threadIdx.x >= kThreads) {
    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x == kThreads) load_tiles(p, ring, stages);
    return;
  }
  const Weights w = copy_weights<K>(p, staged + kWarps * kTileBytes + p.plan.stages * p.plan.stage_bytes);
  ptx::griddepcontrol_wait();  // y and what the epilogue reads
  ptx::griddepcontrol_launch_dependents();
  multiply_tiles<K>(p, ring, stages, warp_tiles + threadIdx.x / 32 * kTileBytes, w);
#endif
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

// Calls body.template operator()<K>() with the kernel type K.
template <class T, class Body>
Status with_kernel(int32_t block, bool by_in, Body body) {
  const auto with = [&]<int B>() {
    return by_in ? body.template operator()<Kernel<T, B, true>>() : body.template operator()<Kernel<T, B, false>>();
  };
  switch (block) {
    case 8: return with.template operator()<8>();
    case 16: return with.template operator()<16>();
    default: return with.template operator()<32>();
  }
}

template <class T>
Status launch(const Product& p, const CudaCall& call) {
  const auto plan = plan_of(call.problem);
  if (!plan) return {StatusCode::unsupported, "[linear] W does not fit in shared memory"};
  Args args{.x = {},
            .y = {},
            .plan = *plan,
            .walk = walk_on_device(p.layout, p.by_in),
            .w = p.w,
            .blocks = static_cast<int32_t>(p.layout.blocks),
            .rows = static_cast<int32_t>(call.problem.output_blocks()),
            .inputs = static_cast<int32_t>(call.problem.inputs),
            .outputs = static_cast<int32_t>(call.problem.outputs),
            .n = static_cast<int32_t>(p.x.n),
            .boxes = wgmma::in_boxes(p.y) && !p.y.features_first(),
            .early = p.x_is_last,
            .finish = {matrix_of<T>(p.y), matrix_of<T>(p.residual), p.bias, p.activation}};
  BS_RETURN_IF_ERROR(cuda::make_tensor_map({.data = p.x.data,
                                            .columns = p.x.features,
                                            .rows = p.x.n,
                                            .row_stride = p.x.token_stride,
                                            .box_columns = wgmma::kChunk,
                                            .box_rows = static_cast<uint32_t>(plan->tokens)},
                                           args.x));
  if (args.boxes) {
    BS_RETURN_IF_ERROR(cuda::make_tensor_map({.data = p.y.data,
                                              .columns = p.y.features,
                                              .rows = p.y.n,
                                              .row_stride = p.y.token_stride,
                                              .box_columns = kSide,
                                              .box_rows = kSide},
                                             args.y));
  }
  return with_kernel<T>(p.layout.block_size, p.by_in, [&]<class K>() {
    return cuda::launch({.blocks = std::min<int64_t>(call.card.multiprocessors, plan->tiles),
                         .threads = kThreads + 32,
                         .shared_bytes = plan->shared_bytes(),
                         .stream = stream_of(call),
                         .overlap = true},
                        w_in_smem_product<K>, args);
  });
}

template <class T>
Status prepare() {
  for (int32_t block : {8, 16, 32}) {
    for (bool by_in : {false, true}) {
      BS_RETURN_IF_ERROR(
          with_kernel<T>(block, by_in, [&]<class K>() { return cuda::prepare(w_in_smem_product<K>, kSharedBytes); }));
    }
  }
  return cuda::prepare_tensor_maps();
}

}  // namespace
}  // namespace blocksparse::gemm::w_in_smem
