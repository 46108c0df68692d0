// y = f(sum over blocks and taps of W x + bias), and dgrad likewise, in steps of one pixel, b = 32.
//   x, y: channels-last images, x as a raster (see raster.h)   w [blocks, taps, b, b]   16-bit elements, sums in f32
// Who does what
//   tables    one kernel in front lists the blocks of each tile of 128 outputs by their channels, and copies W into
//             wgmma's order
//   grid      one thread block an SM, which takes tiles of 128 outputs x 256 positions, longest first
//   load      one lane: for each chunk of 64 channels the positions of the tile and what taps reach beyond them, for
//             each block W at all taps
//   compute   4 warpgroups of 64 positions each, so that all have the same blocks; a block is 2 products for each tap
//             behind one test. With a record and a test for each tap, as the linear op has them, 72 instead of 54 us
//   finish    through shared memory; positions between images are dropped
#pragma once

#include "cuda/launch.h"
#include "ops/conv/cuda.h"
#include "ops/conv/cuda_halo_blocks_kernel.h"
#include "ops/conv/cuda_halo_tables.h"

namespace blocksparse::conv {
namespace {

template <class T>
HaloProduct block_arguments(const Product& p, const HaloBlocksPlan& plan, const linear::ManyTables& tables) {
  const int64_t tiles = (plan.raster.positions + kHaloBlockTokens - 1) / kHaloBlockTokens;
  const linear::ManyProduct args{.tables = tables,
                                 .out_tiles = static_cast<int32_t>(plan.tiles),
                                 .token_tiles = static_cast<int32_t>(tiles),
                                 .group = static_cast<int32_t>(std::min<int64_t>(4, tiles)),
                                 .n = static_cast<int32_t>(plan.raster.positions),
                                 .outputs = p.y.channels,
                                 .boxes = false,
                                 .finish = {linear::matrix_of<T>(as_tokens(p.y)), {}, p.bias, p.activation}};
  return {.p = args,
          .pixels = linear::ImageSteps(in_raster(plan.phase.x, plan.raster), false),
          .taps = {},
          .taps_of_row = {},
          .row_step = plan.raster.row_step,
          .column_step = plan.raster.column_step,
          .tap_rows = static_cast<int32_t>(plan.phase.x.taps[1]),
          .tap_columns = static_cast<int32_t>(plan.phase.x.taps[0]),
          .w_bytes = plan.block_bytes,
          .columns = static_cast<int32_t>(p.y.size[2]),
          .rows = static_cast<int32_t>(p.y.size[1]),
          .images = static_cast<int32_t>(p.y.n),
          .x_bytes = plan.rows * linear::kChunk * 2,
          .buffer_bytes = plan.buffer_bytes,
          .buffers = plan.buffers,
          .stages = plan.stages};
}

template <class T>
Status launch_halo_blocks(const Product& p, const HaloBlocksPlan& plan, const CudaCall& call) {
  const linear::ManyTables tables = halo_tables(plan, call.workspace.data);
  CUtensorMap map{};
  BS_RETURN_IF_ERROR(cuda::make_image_map(
      linear::boxed(in_raster(plan.phase.x, plan.raster), false, linear::kChunk, static_cast<uint32_t>(plan.rows)),
      map));
  const auto stream = static_cast<cudaStream_t>(call.stream);
  BS_RETURN_IF_ERROR(make_halo_tables(p, plan, tables, stream));
  const HaloProduct args = block_arguments<T>(p, plan, tables);
  const bool plain = p.bias == nullptr && p.activation == Activation::none;
  return cuda::launch({.blocks = std::min<int64_t>(call.card.multiprocessors, plan.tiles * args.p.token_tiles),
                       .threads = HaloBlocks<T>::kThreads,
                       .shared_bytes = static_cast<int>(kHaloProductBytes),
                       .stream = stream,
                       .overlap = true},
                      plain ? halo_blocks<T, true> : halo_blocks<T, false>, map, args);
}

template <class T>
Status prepare_halo_blocks() {
  BS_RETURN_IF_ERROR(cuda::prepare(halo_blocks<T, true>, static_cast<int>(kHaloProductBytes)));
  BS_RETURN_IF_ERROR(cuda::prepare(halo_blocks<T, false>, static_cast<int>(kHaloProductBytes)));
  return prepare_halo_tables();
}

}  // namespace
}  // namespace blocksparse::conv
