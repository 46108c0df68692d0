// Convolutions by the linear op's kernels for many tokens, which gather x as they copy it: 16 bits, channels-last.
#pragma once

#include "ops/conv/cuda.h"
#include "ops/conv/cuda_taps.h"
#include "ops/linear/cuda_many.h"
#include "ops/linear/cuda_many_gradient.h"

namespace blocksparse::conv {
namespace {

using linear::GatheredImages;
using linear::XOrder;

// `positions` are the pixels of the images that x is gathered for. The inverse of a step of 1 is a forward one with the
// taps in reverse.
inline GatheredImages gathered(const Images& x, const SpatialSizes& positions, const Gather& gather, int32_t block) {
  GatheredImages g{.data = x.data,
                   .n = x.n,
                   .channels = x.channels,
                   .inputs_of_tap = inputs_of_tap(x.channels, block),
                   .size = {},
                   .positions = {},
                   .taps = {},
                   .first = {},
                   .stride = {},
                   .dilation = {}};
  for (size_t axis = 0; axis < 3; ++axis) {
    const size_t from = 2 - axis;  // width first
    const int64_t reach = (gather.kernel[from] - 1) * gather.dilation[from];
    g.size[axis] = x.size[from];
    g.positions[axis] = positions[from];
    g.taps[axis] = gather.kernel[from];
    g.first[axis] = static_cast<int32_t>(gather.inverse ? gather.padding[from] - reach : -gather.padding[from]);
    g.stride[axis] = static_cast<int32_t>(gather.stride[from]);
    g.dilation[axis] = static_cast<int32_t>(gather.dilation[from]);
  }
  return g;
}

// What lies behind the list of taps.
inline Workspace after(const Workspace& workspace, int64_t bytes) {
  return {static_cast<char*>(workspace.data) + bytes, workspace.bytes - static_cast<size_t>(bytes)};
}

template <class T>
Status launch_many_product(const Product& p, const CudaCall& call) {
  const linear::CudaProblem problem = many_problem(p);
  const int64_t taps = p.gather.taps(), rows = problem.output_blocks();
  const GatheredImages images = gathered(p.x, p.y.size, p.gather, p.layout.block_size);
  linear::Product product = as_linear(p);
  product.layout.blocks = problem.blocks;
  product.x.n = problem.n;
  const auto list = list_taps({.from = linear::walk_on_device(p.layout, p.by_in),
                               .rows = rows,
                               .blocks = p.layout.blocks,
                               .taps = static_cast<int32_t>(taps),
                               .columns_of_tap = static_cast<int32_t>(images.inputs_of_tap / p.layout.block_size),
                               .mirrored = p.gather.inverse,
                               .gates = static_cast<const float*>(p.gates)},
                              call.workspace.data, static_cast<cudaStream_t>(call.stream));
  if (!list.ok()) return list.status();
  const Workspace rest = after(call.workspace, tap_places(rows, p.layout.blocks, taps).end);
  return linear::launch_many_of<T, XOrder::images>(product, {list->walk, list->gates, &images},
                                                   {problem, call.card, rest, call.stream});
}

template <class T>
Status launch_many_gradient(const WeightGradient& g, const CudaCall& call) {
  const linear::CudaProblem problem = many_problem(g);
  const int64_t taps = g.gather.taps(), rows = problem.output_blocks();
  const GatheredImages images = gathered(g.columns, g.rows.size, g.gather, g.layout.block_size);
  const auto list = list_taps({.from = linear::walk_on_device(g.layout, false),
                               .rows = rows,
                               .blocks = g.layout.blocks,
                               .taps = static_cast<int32_t>(taps),
                               .columns_of_tap = static_cast<int32_t>(images.inputs_of_tap / g.layout.block_size),
                               .mirrored = false,
                               .gates = static_cast<const float*>(g.gates)},
                              call.workspace.data, static_cast<cudaStream_t>(call.stream));
  if (!list.ok()) return list.status();
  const Workspace rest = after(call.workspace, tap_places(rows, g.layout.blocks, taps).end);
  linear::GradTerm term{.x = as_tokens(g.columns), .dy = as_tokens(g.rows)};
  term.x.n = problem.n;
  return linear::launch_many_gradient_of<T, XOrder::images>(
      {.term = term,
       .images = &images,
       .walk = list->walk,
       .target = {list->gates, g.dw, g.dw_dtype == DType::f32, g.accumulate},
       .w = g.w,
       .dgates = static_cast<float*>(g.dgates),
       .gates = static_cast<int32_t>(g.layout.blocks),
       .gate_blocks = static_cast<int32_t>(taps)},
      {problem, call.card, rest, call.stream});
}

template <class T>
Status prepare_many() {
  BS_RETURN_IF_ERROR(prepare_taps());
  BS_RETURN_IF_ERROR((linear::prepare_many_of<T, XOrder::images>()));
  return linear::prepare_many_gradient_of<T, XOrder::images>();
}

template <class T>
CudaKernels make_many(DType dtype) {
  return {CudaWay::many, dtype, prepare_many<T>, launch_many_product<T>, launch_many_gradient<T>};
}

}  // namespace
}  // namespace blocksparse::conv
