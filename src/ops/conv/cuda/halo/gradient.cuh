// dW[i, tap] = dy_out^T x_in, x moved by the tap, for up to 3 x 3 taps in steps of one pixel: the rows of images are in
// shared memory once for all taps.
//   x, dy: channels-last images, read as rasters (see raster.h)   dW [blocks, taps, b, b]
//   16-bit elements, sums in f32
// Who does what
//   jobs      up to 64 inputs with one dy; each thread block finds them itself (jobs.cuh)
//   grid      one thread block an SM; it has whole jobs and parts of jobs, as in wgrad_wgmma
//   load      a warp: boxes of 128 positions of dy, and for each patch of x these positions and all that taps reach
//             beyond them
//   compute   a warpgroup for each row of taps. wgmma's columns are the row's taps x 32 or 64 inputs, so a row reads dy
//             from shared memory once, and the tensor cores are never short of work
//   finish    as in wgrad_wgmma
#pragma once

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "ops/conv/cuda/driver.h"
#include "ops/conv/cuda/halo/gradient_kernel.cuh"

namespace blocksparse::conv {
namespace {

template <class T, class Body>
Status with_halo_gradient(int32_t block, int32_t tap_columns, Body body) {
  const auto with = [&]<int Taps>() {
    return block >= 64 ? body.template operator()<HaloGradientKernel<T, 64, Taps>>()
                       : body.template operator()<HaloGradientKernel<T, 32, Taps>>();
  };
  if (tap_columns == 1) return with.template operator()<1>();
  return tap_columns == 2 ? with.template operator()<2>() : with.template operator()<3>();
}

inline HaloTables halo_tables(void* workspace, int64_t taps) {
  auto* base = static_cast<char*>(workspace);
  const HaloGradientPlaces at = halo_gradient_places(taps);
  return {.counts = reinterpret_cast<int4*>(base + at.counts),
          .shares = reinterpret_cast<gemm::wgrad_wgmma::Share*>(base + at.shares),
          .jobs = reinterpret_cast<int4*>(base + at.jobs),
          .ids = reinterpret_cast<int32_t*>(base + at.ids),
          .parts = reinterpret_cast<float*>(base + at.parts)};
}

inline HaloGradient gradient_arguments(const WeightGradient& g, const HaloGradientPlan& plan, void* workspace) {
  const int32_t b = g.layout.block_size;
  const HaloPatches patches{.blocks = gemm::walk_on_device(g.layout, false),
                            .rows = static_cast<int32_t>(ceil_div(g.rows.channels, b)),
                            .block_shift = __builtin_ctz(static_cast<unsigned>(b)),
                            .strips = plan.strips,
                            .words = plan.words,
                            .steps = static_cast<int32_t>(plan.steps())};
  return {.patches = patches,
          .tables = halo_tables(workspace, g.gather.taps()),
          .target = {nullptr, g.dw, g.dw_dtype == DType::f32, g.accumulate},
          .outputs = g.rows.channels,
          .inputs = g.columns.channels,
          .tap_rows = plan.tap_rows,
          .pixels = gemm::wgmma::ImageSteps(in_raster(plan.phase.x, plan.raster), false),
          .row_step = plan.raster.row_step,
          .column_step = plan.raster.column_step,
          .x_bytes = plan.rows * halo_gradient_form(b).patch_inputs * 2,
          .patch_bytes = plan.patch_bytes,
          .stage_bytes = plan.stage_bytes,
          .stages = plan.stages};
}

template <class T>
Status launch_halo_gradient(const WeightGradient& g, const CudaCall& call) {
  const auto plan = plan_halo_gradient(g);
  if (!plan) return {StatusCode::unsupported, "[conv] not a gradient of up to 3 x 3 taps"};
  const int32_t grid = std::min(call.card.multiprocessors, gemm::wgrad_wgmma::kMostGrid);
  return with_halo_gradient<T>(g.layout.block_size, plan->tap_columns, [&]<class K>() {
    HaloGradientMaps maps{};
    const auto x =
        gemm::wgmma::boxed(in_raster(plan->phase.x, plan->raster), false, K::kPatch, static_cast<uint32_t>(plan->rows));
    BS_RETURN_IF_ERROR(cuda::make_image_map(x, maps.x));
    const auto dy = in_raster(g.rows, plan->phase, plan->raster);
    BS_RETURN_IF_ERROR(cuda::make_image_map(gemm::wgmma::boxed(dy, false, 64, K::kTokens), maps.dy));
    const HaloGradient args = gradient_arguments(g, *plan, call.workspace.data);
    BS_RETURN_IF_ERROR(cuda::launch({.blocks = grid,
                                     .threads = (plan->tap_rows + 1) * 128,
                                     .shared_bytes = static_cast<int>(kHaloSharedBytes),
                                     .stream = static_cast<cudaStream_t>(call.stream),
                                     .overlap = true},
                                    halo_gradient<K>, maps, args));
    return cuda::launch({.blocks = std::min<int64_t>(grid, plan->most_jobs) * halo_slices<K>(plan->tap_rows),
                         .threads = kHaloRuns * 128,
                         .stream = static_cast<cudaStream_t>(call.stream),
                         .overlap = true},
                        halo_combine<K>, args);
  });
}

template <class T>
Status prepare_halo_gradient() {
  for (int32_t block : {32, 64}) {
    for (int32_t tap_columns : {1, 2, 3}) {
      BS_RETURN_IF_ERROR((with_halo_gradient<T>(block, tap_columns, [&]<class K>() {
        BS_RETURN_IF_ERROR(cuda::prepare(halo_combine<K>, 0));
        return cuda::prepare(halo_gradient<K>, static_cast<int>(kHaloSharedBytes));
      })));
    }
  }
  return cuda::prepare_tensor_maps();
}

}  // namespace
}  // namespace blocksparse::conv
