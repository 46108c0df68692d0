// y = f(sum over blocks and taps of W x + bias), and dgrad likewise, in steps of one pixel, b = 16 (3 x 3 taps), 32, 64
// and 128: the rows of images are in shared memory once for all taps.
//   x, y: channels-last images, x as a raster (see raster.h)   w [blocks, taps, b, b]   16-bit elements, sums in f32
// Who does what
//   grid      two thread blocks an SM, so that one multiplies while the other stores. Each has a run of tiles of 64
//             outputs x 256 positions, of small images less (walk.cuh). There is one launch: tables made by a kernel in
//             front took 3 us
//   load      a warp: for each chunk of 64 channels it loads the tile's positions, and those that taps reach beyond
//             them; for each block its taps in turn, as they lie
//   compute   2 warpgroups of 2 x 64 positions, which are wgmma's rows; a block's outputs are its columns. With a
//   record
//             and a test for each tap, as wgmma has them, it took 72 us instead of 54 (b = 32, density .25)
//   finish    from registers; positions between images are dropped
#pragma once

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "ops/conv/cuda/driver.h"
#include "ops/conv/cuda/halo/product_kernel.cuh"

namespace blocksparse::conv {
namespace {

// Calls body.template operator()<K>() with the kernel type K.
template <class T, class Body>
Status with_halo_kernel(int32_t block, int32_t stage_taps, int32_t groups, bool by_in, Body body) {
  const auto with_groups = [&]<int B, int Taps, int Groups>() {
    return by_in ? body.template operator()<HaloKernel<T, B, Taps, Groups, true>>()
                 : body.template operator()<HaloKernel<T, B, Taps, Groups, false>>();
  };
  const auto with = [&]<int B, int Taps>() {
    return groups == 2 ? with_groups.template operator()<B, Taps, 2>() : with_groups.template operator()<B, Taps, 4>();
  };
  if (block > 32) return with.template operator()<64, 1>();
  if (block == 16) return with.template operator()<16, 9>();
  return stage_taps == 3 ? with.template operator()<32, 3>() : with.template operator()<32, 1>();
}

template <class T>
HaloProduct halo_arguments(const Product& p, const HaloProductPlan& plan) {
  const int32_t b = p.layout.block_size;
  const HaloWalk walk{.blocks = gemm::walk_on_device(p.layout, p.by_in),
                      .outputs = p.y.channels,
                      .tiles = static_cast<int32_t>(plan.tiles),
                      .jobs = static_cast<int32_t>(plan.jobs),
                      .tile_jobs = plan.tile_jobs,
                      .block_rows = static_cast<int32_t>(ceil_div(p.y.channels, b)),
                      .block_shift = __builtin_ctz(static_cast<unsigned>(b)),
                      .split_shift = b == 128 ? 1 : 0,
                      .taps = static_cast<int32_t>(p.gather.taps()),
                      .by_in = p.by_in,
                      .has_blocks = p.layout.blocks > 0,
                      .block_cost = halo_block_cost(b, p.gather.taps())};
  return {.walk = walk,
          .finish = {gemm::matrix_of<T>(as_tokens(p.y)), {}, p.bias, p.activation},
          .pixels = gemm::wgmma::ImageSteps(in_raster(plan.phase.x, plan.raster), false),
          .taps = walk.taps,
          .tap_columns = static_cast<int32_t>(plan.phase.x.taps[0]),
          .row_step = plan.raster.row_step,
          .column_step = plan.raster.column_step,
          .reach = plan.raster.reach,
          .mirrored = plan.phase.taps.mirrored,
          .columns = static_cast<int32_t>(p.y.size[2]),
          .rows = static_cast<int32_t>(p.y.size[1]),
          .images = static_cast<int32_t>(p.y.n),
          .x_bytes = plan.rows * gemm::wgmma::kChunk * 2,
          .buffer_bytes = plan.buffer_bytes,
          .stages = plan.stages};
}

inline Status make_halo_maps(const Product& p, const HaloProductPlan& plan, HaloMaps& maps) {
  const int32_t b = p.layout.block_size, side = std::min(b, kHaloOutputs);
  const auto x = gemm::wgmma::boxed(in_raster(plan.phase.x, plan.raster), false, gemm::wgmma::kChunk,
                                    static_cast<uint32_t>(plan.rows));
  BS_RETURN_IF_ERROR(cuda::make_image_map(x, maps.x));
  if (p.layout.blocks == 0) return {};  // a map of nothing is refused, and not needed here
  return cuda::make_tensor_map({.data = p.w,
                                .columns = b,
                                .rows = p.layout.blocks * p.gather.taps() * b,
                                .row_stride = b,
                                .box_columns = static_cast<uint32_t>(side),
                                .box_rows = static_cast<uint32_t>(side * plan.stage_taps)},
                               maps.w);
}

template <class T>
Status launch_halo_product(const Product& p, const CudaCall& call) {
  const auto plan = plan_halo_product(p);
  if (!plan) return {StatusCode::unsupported, "[conv] not in steps of one pixel"};
  HaloMaps maps{};
  BS_RETURN_IF_ERROR(make_halo_maps(p, *plan, maps));
  const bool plain = p.bias == nullptr && p.activation == Activation::none;
  return with_halo_kernel<T>(p.layout.block_size, plan->stage_taps, plan->groups, p.by_in, [&]<class K>() {
    const int64_t resident = int64_t{plan->resident} * call.card.multiprocessors;
    return cuda::launch({.blocks = std::min(resident, plan->tiles * plan->jobs),
                         .threads = K::kThreads,
                         .shared_bytes = plan->shared_bytes(),
                         .stream = static_cast<cudaStream_t>(call.stream),
                         .overlap = true},
                        plain ? halo_product<K, true> : halo_product<K, false>, maps, halo_arguments<T>(p, *plan));
  });
}

template <class T>
Status prepare_halo_product() {
  for (int32_t block : {16, 32, 64}) {
    for (int32_t taps : {1, 3}) {
      for (int32_t groups : {2, 4}) {
        for (bool by_in : {false, true}) {
          BS_RETURN_IF_ERROR(with_halo_kernel<T>(block, taps, groups, by_in, [&]<class K>() {
            BS_RETURN_IF_ERROR(cuda::prepare_for_many(halo_product<K, true>, kHaloWholeBytes));
            return cuda::prepare_for_many(halo_product<K, false>, kHaloWholeBytes);
          }));
        }
      }
    }
  }
  return cuda::prepare_tensor_maps();
}

}  // namespace
}  // namespace blocksparse::conv
