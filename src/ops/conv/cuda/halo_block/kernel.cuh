// dW[i, tap] = gate_i dy_out^T x_in, x moved by the tap, for up to 3 x 3 taps in steps of one pixel, in one kernel: the
// plain way of few blocks and small images.
//   x, dy: channels-last images, read as rasters (see halo/raster.h)   dW [blocks, taps, b, b], b = 16, 32, 64
//   16-bit elements, sums in f32
// Who does what
//   grid      a cluster of up to 8 thread blocks for each block of W, or for each row of its taps. A thread block has a
//             part of the positions. There are no tables and no workspace
//   load      the first thread, as in gemm's wgrad_block: boxes of positions of dy, and of x with all that taps reach
//   compute   a warpgroup for each row of taps: outputs are wgmma's rows, the row's taps x inputs its columns. wgmma
//             has 64 rows; for b < 64 those behind the first b repeat them and are dropped
//   finish    sums to shared memory; each thread block adds a share of them, over the cluster in the order of parts
#pragma once

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/griddepcontrol.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ring.h"
#include "gemm/cuda/gradient_target.cuh"
#include "gemm/cuda/walk.h"
#include "gemm/cuda/wgmma/images.cuh"
#include "ops/conv/cuda/driver.h"
#include "ops/conv/cuda/halo_block/plan.h"

namespace blocksparse::conv {
namespace {

// ---- Config ---------------------------------------------------------------------------------------------------------

struct HaloBlockArgs {
  const BlockRef* refs;   // of the rows of W
  const int32_t* out_of;  // the row of each block
  gemm::GradientTarget target;
  int64_t outputs;
  gemm::wgmma::ImageSteps pixels;  // of x
  int32_t tap_rows, together, parts, steps;
  int32_t row_step, column_step;  // positions between rows of taps, and between taps of a row
  int32_t x_bytes;                // of a box
  int32_t stage_bytes, stages;
};

struct HaloBlockMaps {
  CUtensorMap x, dy;
};

// Taps are those of a row.
template <class T, int B, int Taps>
struct HaloBlockKernel {
  using Element = T;
  static constexpr int block = B, kTaps = Taps, kColumns = Taps * B;
  static constexpr int kTokens = halo_block_tokens(B);
  static constexpr int kRow = B * 2;  // bytes of a position
  static constexpr int kDyBytes = kTokens * kRow;
  static constexpr int kPitch = (kColumns + kHaloBlockPadding) * 4;
  static constexpr int kSumBytes = halo_block_sums(B, Taps);  // of a warpgroup
  static constexpr int kMostThreads = B == 64 ? 128 : kMostHaloBlockTaps * 128;
  static constexpr ptx::Swizzle swizzle = B == 64   ? ptx::Swizzle::bytes_128
                                          : B == 32 ? ptx::Swizzle::bytes_64
                                                    : ptx::Swizzle::bytes_32;
  using Sums = float[kColumns / 2];  // [64, columns] of a warpgroup
  static_assert(kSumBytes == B * kPitch);
};

// ---- Device ---------------------------------------------------------------------------------------------------------

// What a thread block makes: rows of taps of a block of W, over some of the steps.
struct HaloBlockPlace {
  int block, out, in, first_row, part, first, last;

  __device__ explicit HaloBlockPlace(const HaloBlockArgs& h) {
    const int here = static_cast<int>(blockIdx.x), cluster = here / h.parts, sets = h.tap_rows / h.together;
    block = cluster / sets, first_row = cluster % sets * h.together;
    part = here % h.parts;
    out = h.out_of[block], in = h.refs[block].from;
    first = static_cast<int>(int64_t{h.steps} * part / h.parts);
    last = static_cast<int>(int64_t{h.steps} * (part + 1) / h.parts);
  }
};

// Fills one stage after the other: dy, then x. One thread calls `next`.
template <class K>
class HaloBlockLoader {
 public:
  __device__ HaloBlockLoader(const HaloBlockArgs& h, const HaloBlockMaps& maps, const HaloBlockPlace& place,
                             const cuda::Ring<kMostHaloBlockStages>& ring, uint32_t data)
      : h_(h), maps_(maps), place_(place), ring_(ring), data_(data), step_(place.first) {}

  __device__ void next() {
    if (step_ == place_.last) return;
    const uint32_t full = ring_.full(stage_), dy = stage_.in(data_, h_.stage_bytes);
    ring_.expect(stage_, static_cast<uint32_t>(K::kDyBytes + h_.x_bytes));
    const int position = step_ * K::kTokens;
    const gemm::wgmma::ImagePixel to = h_.pixels.pixel_of(position);
    ptx::load_image_box(dy, &maps_.dy, full, place_.out * K::block, to.column - h_.pixels.first[0],
                        to.row - h_.pixels.first[1], to.image, 0, 0);
    const gemm::wgmma::ImagePixel from = h_.pixels.pixel_of(position + place_.first_row * h_.row_step);
    ptx::load_image_box(dy + K::kDyBytes, &maps_.x, full, place_.in * K::block, from.column, from.row, from.image, 0,
                        0);
    stage_.advance(h_.stages);
    ++step_;
  }

 private:
  const HaloBlockArgs& h_;
  const HaloBlockMaps& maps_;
  const HaloBlockPlace& place_;
  const cuda::Ring<kMostHaloBlockStages>& ring_;
  uint32_t data_;
  int step_;
  cuda::RingPlace stage_;
};

// A tap further on in x is a position further on in shared memory, so the taps of a row are columns that overlap.
template <class K>
__device__ inline void multiply(typename K::Sums& sums, uint32_t dy, uint32_t x, uint32_t lead) {
  const uint64_t a = ptx::wgmma_matrix(dy, 0, 8 * K::kRow, K::swizzle);  // 0: rows from B on are the first ones again
  const uint64_t b = ptx::wgmma_matrix(x, lead, 8 * K::kRow, K::swizzle);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < K::kTokens / 16; ++k) {
    ptx::wgmma<typename K::Element, K::kColumns, true, true>(sums, a + k * K::kRow, b + k * K::kRow);
  }
  ptx::wgmma_commit();
}

// Leaves a warpgroup's sums, f32 [b][columns], in shared memory.
template <class K>
__device__ inline void leave_sums(const typename K::Sums& sums, uint32_t to) {
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  if (row >= K::block) return;
  to += static_cast<uint32_t>(row * K::kPitch + lane % 4 * 8);
#pragma unroll
  for (int k = 0; k < K::kColumns / 2; k += 2) {
    ptx::st_shared_8(to + static_cast<uint32_t>(k / 2 % 2 * 8 * K::kPitch + k / 4 * 32), {sums[k], sums[k + 1]});
  }
}

// Adds eight sums of each part, in the order of parts. Some are loaded at once, because each takes a while.
__device__ inline void add_parts(float (&values)[8], uint32_t at, int parts) {
  constexpr int kAtOnce = 4;
#pragma unroll 1
  for (int first = 0; first < parts; first += kAtOnce) {
    int4 found[kAtOnce][2];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t there = ptx::shared_of_rank(at, min(first + i, parts - 1));
      found[i][0] = ptx::ld_cluster_16(there), found[i][1] = ptx::ld_cluster_16(there + 16);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= parts) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int4 four = found[i][half];
        values[4 * half] += __int_as_float(four.x), values[4 * half + 1] += __int_as_float(four.y);
        values[4 * half + 2] += __int_as_float(four.z), values[4 * half + 3] += __int_as_float(four.w);
      }
    }
  }
}

// Adds this thread block's share of the cluster's sums, and stores it.
template <class K>
__device__ inline void store_share(const HaloBlockArgs& h, const HaloBlockPlace& place, uint32_t data) {
  constexpr int kRowEights = K::kColumns / 8, kEights = K::block * kRowEights;
  const int threads = h.together * 128;
#pragma unroll 1
  for (int i = place.part * threads + static_cast<int>(threadIdx.x); i < h.together * kEights; i += h.parts * threads) {
    const int group = i / kEights, row = i % kEights / kRowEights, column = i % kRowEights * 8;
    float values[8] = {};
    add_parts(values, data + static_cast<uint32_t>(group * K::kSumBytes + row * K::kPitch + column * 4), h.parts);
    const int64_t taps = int64_t{h.tap_rows} * K::kTaps;
    const int64_t tap = (place.first_row + group) * K::kTaps + column / K::block;
    const int64_t at = ((place.block * taps + tap) * K::block + row) * K::block + column % K::block;
    const bool inside = int64_t{place.out} * K::block + row < h.outputs;
    h.target.template store_any_eight<typename K::Element>(place.block, at, inside ? 8 : 0, values);
  }
}

template <class K>
__global__ void __launch_bounds__(K::kMostThreads, 2)
    halo_block([[maybe_unused]] const __grid_constant__ HaloBlockMaps maps,
               [[maybe_unused]] const __grid_constant__ HaloBlockArgs h) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char staged[];
  __shared__ cuda::Ring<kMostHaloBlockStages> ring;
  const uint32_t data = ptx::shared_address(staged);
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&maps.x);
    ptx::prefetch_map(&maps.dy);
    ring.init(h.stages, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_wait();
  const HaloBlockPlace place(h);
  HaloBlockLoader<K> loader(h, maps, place, ring, data);
  if (threadIdx.x == 0) {
    for (int i = 0; i + 2 < h.stages; ++i) loader.next();
  }
  __syncthreads();
  typename K::Sums sums;
#pragma unroll
  for (int i = 0; i < K::kColumns / 2; ++i) sums[i] = 0;
#pragma unroll
  for (int i = 0; i < K::kColumns / 2; ++i) ptx::hold(sums[i]);  // set here, or each product waits for the last one
  const int group = static_cast<int>(threadIdx.x) / 128;
  const auto row = static_cast<uint32_t>(K::kDyBytes + group * h.row_step * K::kRow);
  const auto lead = static_cast<uint32_t>(h.column_step * K::kRow);
  cuda::RingPlace stage;
#pragma unroll 1
  for (int step = place.first; step < place.last; ++step) {
    ring.wait_full(stage);
    // Every warp has completed the products of two steps ago. Their stage is filled next.
    __syncthreads();
    if (threadIdx.x == 0) loader.next();
    __syncwarp();
    const uint32_t dy = stage.in(data, h.stage_bytes);
    multiply<K>(sums, dy, dy + row, lead);
    ptx::wgmma_wait<1>();
    stage.advance(h.stages);
  }
  ptx::wgmma_wait<0>();
  __syncthreads();
  leave_sums<K>(sums, data + static_cast<uint32_t>(group * K::kSumBytes));
  ptx::cluster_arrive();
  ptx::cluster_wait();
  store_share<K>(h, place, data);
  ptx::cluster_arrive();  // nobody leaves while others read its sums
  ptx::cluster_wait();
#endif
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

template <class T, class Body>
Status with_halo_block(int32_t block, int32_t tap_columns, Body body) {
  const auto with = [&]<int B>() {
    if (tap_columns == 1) return body.template operator()<HaloBlockKernel<T, B, 1>>();
    return tap_columns == 2 ? body.template operator()<HaloBlockKernel<T, B, 2>>()
                            : body.template operator()<HaloBlockKernel<T, B, 3>>();
  };
  if (block == 16) return with.template operator()<16>();
  return block == 32 ? with.template operator()<32>() : with.template operator()<64>();
}

template <class K>
Status make_maps(const WeightGradient& g, const HaloBlockPlan& plan, HaloBlockMaps& maps) {
  const auto make = [](const gemm::GatheredImages& images, int32_t positions, CUtensorMap& map) {
    return cuda::make_image_map(gemm::wgmma::boxed(images, false, K::block, static_cast<uint32_t>(positions)), map);
  };
  BS_RETURN_IF_ERROR(make(in_raster(plan.phase.x, plan.raster), plan.rows, maps.x));
  return make(in_raster(g.rows, plan.phase, plan.raster), K::kTokens, maps.dy);
}

template <class K>
HaloBlockArgs arguments_of(const WeightGradient& g, const HaloBlockPlan& plan) {
  return {.refs = gemm::walk_on_device(g.layout, false).refs,
          .out_of = gemm::out_of_on_device(g.layout),
          .target = {static_cast<const float*>(g.gates), g.dw, g.dw_dtype == DType::f32, g.accumulate},
          .outputs = g.rows.channels,
          .pixels = gemm::wgmma::ImageSteps(in_raster(plan.phase.x, plan.raster), false),
          .tap_rows = plan.tap_rows,
          .together = plan.together,
          .parts = plan.parts,
          .steps = plan.steps,
          .row_step = plan.raster.row_step,
          .column_step = plan.raster.column_step,
          .x_bytes = plan.rows * K::kRow,
          .stage_bytes = plan.stage_bytes,
          .stages = plan.stages};
}

template <class T>
Status launch_halo_block(const WeightGradient& g, const CudaCall& call) {
  const auto plan = plan_halo_block(g, call.card.multiprocessors);
  if (!plan) return {StatusCode::unsupported, "[conv] not a gradient of up to 3 x 3 taps of blocks of 16 to 64"};
  if (plan->clusters == 0) return {};
  return with_halo_block<T>(g.layout.block_size, plan->tap_columns, [&]<class K>() {
    HaloBlockMaps maps{};
    BS_RETURN_IF_ERROR(make_maps<K>(g, *plan, maps));
    return cuda::launch({.blocks = plan->clusters * plan->parts,
                         .threads = plan->together * 128,
                         .shared_bytes = plan->shared_bytes,
                         .stream = static_cast<cudaStream_t>(call.stream),
                         .overlap = true,
                         .cluster = plan->parts},
                        halo_block<K>, maps, arguments_of<K>(g, *plan));
  });
}

template <class T>
Status prepare_halo_block() {
  for (int32_t block : {16, 32, 64}) {
    for (int32_t tap_columns : {1, 2, 3}) {
      BS_RETURN_IF_ERROR((with_halo_block<T>(block, tap_columns, [&]<class K>() {
        return cuda::prepare_for_many(halo_block<K>, static_cast<int>(kMostHaloBlockBytes));
      })));
    }
  }
  return cuda::prepare_tensor_maps();
}

template <class T>
CudaKernels make_halo_block(DType dtype) {
  return {CudaWay::halo_block, dtype, prepare_halo_block<T>, nullptr, launch_halo_block<T>};
}

}  // namespace
}  // namespace blocksparse::conv
