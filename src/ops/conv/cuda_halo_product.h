// y = f(sum over blocks and taps of W x + bias), and dgrad likewise, in steps of one pixel, b = 64: rows of images are
// in shared memory once for all taps.
//   x, y: channels-last images, x as a raster (see raster.h)   w [blocks, taps, b, b]   16-bit elements, sums in f32
// Who does what
//   tables    the linear op's for many tokens; the columns of W are chunks of 64 channels, in each all taps
//   grid      one thread block an SM, which takes tiles of outputs x positions, longest first
//   load      a warpgroup of feeders: for each chunk of channels the positions of the tile and what taps reach beyond
//             them, and for each tap of it the blocks
//   compute   as the linear op's: a tap is x some rows further on, which wgmma's operands may begin with
//   finish    through shared memory; positions between images are dropped
#pragma once

#include "cuda/launch.h"
#include "ops/conv/cuda.h"
#include "ops/conv/cuda_halo_product_kernel.h"
#include "ops/conv/cuda_taps.h"
#include "ops/linear/cuda_many.h"

namespace blocksparse::conv {
namespace {

// body.template operator()<K>() with the linear op's kernel whose products these are.
template <class T, class Body>
Status with_halo_product(bool by_in, Body body) {
  using linear::ManyKind, linear::ManyWeights, linear::XOrder;
  return by_in ? body.template operator()<ManyWeights<T, ManyKind::direct, true, XOrder::tokens>>()
               : body.template operator()<ManyWeights<T, ManyKind::direct, false, XOrder::tokens>>();
}

template <class T>
HaloProduct halo_arguments(const Product& p, const HaloProductPlan& plan, const linear::ManyTables& tables) {
  const linear::ManyPlan many = linear::plan_many(plan.problem);
  const int64_t tokens = linear::form_of(many.kind).tokens, tiles = (plan.raster.positions + tokens - 1) / tokens;
  const linear::Product product = as_linear(p);
  const linear::ManyProduct args{.tables = tables,
                                 .out_tiles = static_cast<int32_t>(many.tiles),
                                 .token_tiles = static_cast<int32_t>(tiles),
                                 .group = static_cast<int32_t>(std::min<int64_t>(4, tiles)),
                                 .n = static_cast<int32_t>(plan.raster.positions),
                                 .outputs = p.y.channels,
                                 .boxes = false,
                                 .finish = {linear::matrix_of<T>(product.y), {}, p.bias, p.activation}};
  return {.p = args,
          .pixels = linear::ImageSteps(in_raster(plan.phase.x, plan.raster), false),
          .taps = cuda::Divider(plan.phase.taps.taps()),
          .taps_of_row = cuda::Divider(plan.phase.x.taps[0]),
          .row_step = plan.raster.row_step,
          .column_step = plan.raster.column_step,
          .tap_rows = static_cast<int32_t>(plan.phase.x.taps[1]),
          .tap_columns = static_cast<int32_t>(plan.phase.x.taps[0]),
          .w_bytes = 0,
          .columns = static_cast<int32_t>(p.y.size[2]),
          .rows = static_cast<int32_t>(p.y.size[1]),
          .images = static_cast<int32_t>(p.y.n),
          .x_bytes = plan.rows * linear::kChunk * 2,
          .buffer_bytes = plan.buffer_bytes,
          .buffers = plan.buffers,
          .stages = plan.stages};
}

template <class T>
Status launch_halo_product(const Product& p, const CudaCall& call) {
  const auto plan = plan_halo_product(p);
  if (!plan) return {StatusCode::unsupported, "[conv] not in steps of one pixel"};
  const linear::CudaProblem& problem = plan->problem;
  const int64_t rows = problem.output_blocks();
  TapList taps = tap_list(plan->phase, p.gather, p.layout, p.by_in, rows, p.gates);
  taps.chunk_columns = linear::kChunk / p.layout.block_size;
  const auto list = list_taps(taps, call.workspace.data, static_cast<cudaStream_t>(call.stream));
  if (!list.ok()) return list.status();
  const linear::CudaCall inner{problem, call.card, after_taps(call.workspace, rows, p.layout.blocks, p.gather.taps()),
                               call.stream};
  const linear::ManyPlan many = linear::plan_many(problem);
  const linear::ManyTables tables = linear::many_tables(many, problem.block, inner.workspace.data);
  linear::Product product = as_linear(p);
  product.layout.blocks = problem.blocks;  // of all taps: the copies of W are found by their number
  return with_halo_product<T>(p.by_in, [&]<class K>() {
    static_assert(K::kStagedBytes == kHaloStagedBytes && K::kWBytes == kHaloWeightBytes);
    typename K::Maps maps{};
    const auto x =
        linear::boxed(in_raster(plan->phase.x, plan->raster), false, linear::kChunk, static_cast<uint32_t>(plan->rows));
    BS_RETURN_IF_ERROR(cuda::make_image_map(x, maps.x.map));
    BS_RETURN_IF_ERROR(K::make_w_map(product, linear::many_copies(problem) ? tables.copy : p.w, maps));
    BS_RETURN_IF_ERROR(linear::make_many_tables(many, inner, list->walk, list->gates, tables));
    BS_RETURN_IF_ERROR(linear::pack_many_weights(many, inner, list->walk, {p.w, list->gates, p.dtype}, tables));
    const HaloProduct args = halo_arguments<T>(p, *plan, tables);
    const bool plain = p.bias == nullptr && p.activation == Activation::none;
    return cuda::launch({.blocks = std::min<int64_t>(call.card.multiprocessors, many.tiles * args.p.token_tiles),
                         .threads = K::kThreads,
                         .shared_bytes = static_cast<int>(kHaloProductBytes),
                         .stream = static_cast<cudaStream_t>(call.stream),
                         .overlap = true},
                        plain ? halo_product<T, K, true> : halo_product<T, K, false>, maps, args);
  });
}

template <class T>
Status prepare_halo_product() {
  for (bool by_in : {false, true}) {
    BS_RETURN_IF_ERROR(with_halo_product<T>(by_in, [&]<class K>() {
      BS_RETURN_IF_ERROR(cuda::prepare(halo_product<T, K, true>, static_cast<int>(kHaloProductBytes)));
      return cuda::prepare(halo_product<T, K, false>, static_cast<int>(kHaloProductBytes));
    }));
  }
  BS_RETURN_IF_ERROR(prepare_taps());
  BS_RETURN_IF_ERROR(linear::prepare_many_tables());
  return linear::prepare_many_pack();
}

}  // namespace
}  // namespace blocksparse::conv
