// y = f(x W^T + bias + residual) for few features and many tokens, and dgrad likewise, b = 8, 16 and 32 on Hopper: all
// of W is in the shared memory of each thread block, which reads every x once and every y once.
//   x [n, inputs]   w [blocks, b, b]   y [n, outputs]   16-bit elements, sums in f32
// Who does what
//   grid      a thread block an SM, which takes every so many tile of 32 or 64 tokens with all of their features
//   load      one warp fills a ring of tiles with boxes; all others copy W once, as it lies, while the first tiles
//             come: so no kernel is needed in front. Those of `many` take 3 us and more
//   compute   each warp has 32 tokens x 32 outputs of a tile: mma.sync, see cuda_resident_tile.h
//   finish    by way of shared memory, while the other warps are at this tile or the next
#pragma once

#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/tensor_map.h"
#include "gemm/cuda/w_in_smem/tile.cuh"

namespace blocksparse::gemm {
namespace {

inline constexpr int kResidentThreads = kResidentWarps * 32;

struct ResidentShared {
  uint64_t full[kMostResidentStages], empty[kMostResidentStages];
};

// Where a thread block is in the ring.
struct ResidentStage {
  int at = 0;
  uint32_t phase = 0;

  __device__ void advance(int stages) {
    if (++at == stages) at = 0, phase ^= 1;
  }
};

// One lane: the tiles of this thread block, chunk by chunk.
__device__ inline void load_tiles(const ResidentProduct& p, ResidentShared& shared, uint32_t ring) {
  ResidentStage stage;
  for (auto tile = static_cast<int>(blockIdx.x); tile < p.plan.tiles; tile += static_cast<int>(gridDim.x)) {
    const uint32_t full = ptx::shared_address(&shared.full[stage.at]);
    uint32_t to = ring + static_cast<uint32_t>(stage.at * p.plan.stage_bytes);
    ptx::mbarrier_wait(ptx::shared_address(&shared.empty[stage.at]), stage.phase ^ 1);
    ptx::mbarrier_arrive_expect(full, static_cast<uint32_t>(p.plan.stage_bytes));
    for (int chunk = 0; chunk < p.plan.chunks; ++chunk, to += p.chunk_bytes()) {
      ptx::load_box(to, &p.x, full, chunk * kChunk, tile * p.plan.tokens);
    }
    stage.advance(p.plan.stages);
  }
}

// One warp: its units of all tiles. Strips change from tile to tile, so that each warp meets long rows and short ones.
template <class K>
__device__ inline void multiply_tiles(const ResidentProduct& p, ResidentShared& shared, uint32_t ring, uint32_t staged,
                                      const ResidentW& w) {
  const int units = p.plan.units();
  const ResidentLane lane = ResidentLane::of<K>();
  ResidentStage stage;
  int unit = static_cast<int>(threadIdx.x) / 32;
  for (auto tile = static_cast<int>(blockIdx.x); tile < p.plan.tiles; tile += static_cast<int>(gridDim.x)) {
    const int part = unit >= p.plan.strips, strip = unit - part * p.plan.strips;
    ResidentSums sums{};
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage.at]), stage.phase);
    if (unit < units) {
      const int x = stage.at * p.plan.stage_bytes + part * kResidentSide * kChunk * 2;
      multiply_unit<K>(w, lane, ring + static_cast<uint32_t>(x), strip, sums);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[stage.at]));
    if (unit < units) {
      const int token = tile * p.plan.tokens + part * kResidentSide;
      finish_unit<typename K::Element>(p, staged, token, strip * kResidentSide, sums);
    }
    stage.advance(p.plan.stages);
    unit = (unit + units + 1) % kResidentWarps;
  }
  if (threadIdx.x % 32 == 0) ptx::bulk_wait_read<0>();
}

template <class K>
__global__ void __launch_bounds__(kResidentThreads + 32, 1)
    resident_product([[maybe_unused]] const __grid_constant__ ResidentProduct p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ ResidentShared shared;
  const uint32_t units = ptx::shared_address(staged), ring = units + kResidentWarps * kResidentUnitBytes;
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&p.x);
    if (p.boxes) ptx::prefetch_map(&p.y);
    for (int s = 0; s < p.plan.stages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[s]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[s]), kResidentWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (!p.early || threadIdx.x >= kResidentThreads) ptx::griddepcontrol_wait();
  if (threadIdx.x >= kResidentThreads) {
    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x == kResidentThreads) load_tiles(p, shared, ring);
    return;
  }
  const ResidentW w =
      copy_weights<K>(p, staged + kResidentWarps * kResidentUnitBytes + p.plan.stages * p.plan.stage_bytes);
  ptx::griddepcontrol_wait();  // y, and what the last step reads
  ptx::griddepcontrol_launch_dependents();
  multiply_tiles<K>(p, shared, ring, units + threadIdx.x / 32 * kResidentUnitBytes, w);
#endif
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

// body.template operator()<K>() with the kernel type K.
template <class T, class Body>
Status with_resident_kernel(int32_t block, bool by_in, Body body) {
  const auto with = [&]<int B>() {
    return by_in ? body.template operator()<Resident<T, B, true>>() : body.template operator()<Resident<T, B, false>>();
  };
  switch (block) {
    case 8: return with.template operator()<8>();
    case 16: return with.template operator()<16>();
    default: return with.template operator()<32>();
  }
}

template <class T>
Status launch_resident(const Product& p, const CudaCall& call) {
  const auto plan = plan_resident(call.problem);
  if (!plan) return {StatusCode::unsupported, "[linear] W does not fit in shared memory"};
  ResidentProduct args{.x = {},
                       .y = {},
                       .plan = *plan,
                       .walk = walk_on_device(p.layout, p.by_in),
                       .w = p.w,
                       .blocks = static_cast<int32_t>(p.layout.blocks),
                       .rows = static_cast<int32_t>(call.problem.output_blocks()),
                       .inputs = static_cast<int32_t>(call.problem.inputs),
                       .outputs = static_cast<int32_t>(call.problem.outputs),
                       .n = static_cast<int32_t>(p.x.n),
                       .boxes = in_boxes(p.y) && !p.y.features_first(),
                       .early = p.x_is_last,
                       .finish = {matrix_of<T>(p.y), matrix_of<T>(p.residual), p.bias, p.activation}};
  BS_RETURN_IF_ERROR(cuda::make_tensor_map({.data = p.x.data,
                                            .columns = p.x.features,
                                            .rows = p.x.n,
                                            .row_stride = p.x.token_stride,
                                            .box_columns = kChunk,
                                            .box_rows = static_cast<uint32_t>(plan->tokens)},
                                           args.x));
  if (args.boxes) {
    BS_RETURN_IF_ERROR(cuda::make_tensor_map({.data = p.y.data,
                                              .columns = p.y.features,
                                              .rows = p.y.n,
                                              .row_stride = p.y.token_stride,
                                              .box_columns = kResidentSide,
                                              .box_rows = kResidentSide},
                                             args.y));
  }
  return with_resident_kernel<T>(p.layout.block_size, p.by_in, [&]<class K>() {
    return cuda::launch({.blocks = std::min<int64_t>(call.card.multiprocessors, plan->tiles),
                         .threads = kResidentThreads + 32,
                         .shared_bytes = plan->shared_bytes(),
                         .stream = stream_of(call),
                         .overlap = true},
                        resident_product<K>, args);
  });
}

template <class T>
Status prepare_resident() {
  for (int32_t block : {8, 16, 32}) {
    for (bool by_in : {false, true}) {
      BS_RETURN_IF_ERROR(with_resident_kernel<T>(
          block, by_in, [&]<class K>() { return cuda::prepare(resident_product<K>, kResidentBytes); }));
    }
  }
  return cuda::prepare_tensor_maps();
}

template <class T>
CudaProductKernel make_resident_product(DType dtype) {
  return {CudaKernel::resident, dtype, prepare_resident<T>, launch_resident<T>};
}

}  // namespace
}  // namespace blocksparse::gemm
