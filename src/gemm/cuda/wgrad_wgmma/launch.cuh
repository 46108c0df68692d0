// dW[i] = gate_i dy_out^T x_in for many tokens: outputs are wgmma's rows, inputs its columns, tokens the depth.
//   x [n, inputs]   dy [n, outputs]   dW [blocks, b, b]   16-bit elements, sums in f32; both operands as they lie
// Who does what
//   tables    one or two small kernels in front list units: up to 256 inputs, twice, of cells whose dy is the same
//   grid      one thread block an SM. Units in turn, so that all are at the same tokens at the same time; those beyond
//             the last whole round are cut along the tokens. Everything cut evenly: 2x the time, x comes from DRAM
//   load      four warps share the boxes of each step: [64 tokens, 64 outputs] of dy and [64 tokens, 32 or 64 inputs]
//             of x, for b = 64 of 32 tokens
//   compute   two warpgroups: the halves of the cells, or for b = 128 of the outputs
//   finish    registers to dW, eight elements a lane; parts of units that were cut go to the workspace and are added in
//             the order of tokens; gradients of gates leave a sum for every 16 x 8 of dW, which a last kernel adds
#pragma once

#include <array>
#include <span>

#include "cuda/launch.h"
#include "gemm/cuda/wgrad_wgmma/kernel.cuh"

namespace blocksparse::gemm {
namespace {

// body.template operator()<K>() with the kernel type K.
template <class T, XOrder Order, int Terms, class Body>
Status with_gradient_kernel(int32_t block, const ManyGradientForm& form, Body body) {
  if (form.strip_outputs == 128) return body.template operator()<GradientKernel<T, 128, Order, Terms>>();
  if (block == 64) return body.template operator()<GradientKernel<T, 64, Order, Terms>>();
  return body.template operator()<GradientKernel<T, 32, Order, Terms>>();
}

inline Status gradient_map(const Activations& a, int32_t features, int32_t tokens, CUtensorMap& map) {
  const bool first = a.features_first();
  return cuda::make_tensor_map({.data = a.data,
                                .columns = first ? a.n : a.features,
                                .rows = first ? a.features : a.n,
                                .row_stride = first ? a.feature_stride : a.token_stride,
                                .box_columns = static_cast<uint32_t>(first ? tokens : features),
                                .box_rows = static_cast<uint32_t>(first ? features : tokens)},
                               map);
}

// What a launch sums, and where that goes.
struct ManyGradientTask {
  std::span<const GradTerm> terms;
  // Where x is gathered from, if it is: then there is one term, and of its x only n and the features count.
  const GatheredImages* images = nullptr;
  DeviceWalk walk;
  GradientTarget target;
  const void* w;
  float* dgates;        // or null
  int32_t gates;        // there are
  int32_t gate_blocks;  // of each
};

template <class K>
Status gradient_maps(const ManyGradientTask& task, typename K::Maps& maps) {
  for (const GradTerm& term : task.terms) {
    if (term.x.n == 0) continue;  // a map of nothing is refused
    const int i = maps.steps.terms;
    if constexpr (K::order == XOrder::images) {
      const GatheredImages& images = *task.images;
      maps.x[i].steps = ImageSteps(images, images.deep());
      maps.x[i].taps = TapSteps(images);
      BS_RETURN_IF_ERROR(cuda::make_image_map(boxed(images, images.deep(), K::kCell, K::kTokens), maps.x[i].map));
    } else {
      BS_RETURN_IF_ERROR(gradient_map(term.x, K::kCell, K::kTokens, maps.x[i].map));
    }
    BS_RETURN_IF_ERROR(gradient_map(term.dy, 64, K::kTokens, maps.dy[i]));
    maps.steps.ends[i] = maps.steps.all() + static_cast<int32_t>((term.x.n + K::kTokens - 1) / K::kTokens);
    ++maps.steps.terms;
  }
  return {};
}

template <class T, XOrder Order, int Terms = 1>
Status launch_many_gradient_of(const ManyGradientTask& t, const CudaCall& call) {
  const ManyGradientForm form = gradient_form_of(call.problem);
  const GradientTables tables = gradient_tables(call.problem, form, call.workspace.data);
  return with_gradient_kernel<T, Order, Terms>(call.problem.block, form, [&]<class K>() {
    const int32_t grid = std::min(call.card.multiprocessors, kMostGradientGrid);
    typename K::Maps maps{};
    BS_RETURN_IF_ERROR(gradient_maps<K>(t, maps));
    const int32_t steps = maps.steps.all();
    BS_RETURN_IF_ERROR(make_gradient_units(call, form, t.walk, tables, grid, steps));
    const ManyGradient args{.tables = tables,
                            .target = t.target,
                            .w = t.w,
                            .gate_parts = t.dgates == nullptr ? nullptr : tables.gate_parts,
                            .gate_blocks = t.gate_blocks,
                            .dgates = t.dgates,
                            .block_shift = __builtin_ctz(static_cast<unsigned>(call.problem.block)),
                            .steps = steps,
                            .outputs = call.problem.outputs,
                            .inputs = call.problem.inputs};
    BS_RETURN_IF_ERROR(cuda::launch({.blocks = grid,
                                     .threads = K::kThreads,
                                     .shared_bytes = K::kSharedBytes,
                                     .stream = stream_of(call),
                                     .overlap = true},
                                    many_gradient<K>, maps, args));
    BS_RETURN_IF_ERROR(cuda::launch({.blocks = CombineForm::kBlocksPerSm * grid,
                                     .threads = CombineForm::kThreads,
                                     .stream = stream_of(call),
                                     .overlap = true},
                                    gradient_combine<typename K::OfOne>, args, grid));
    if (t.dgates == nullptr || t.gates == 0) return Status();
    return cuda::launch({.blocks = std::min<int64_t>((t.gates + 7) / 8, int64_t{16} * grid),
                         .threads = 256,
                         .stream = stream_of(call),
                         .overlap = true},
                        gradient_of_gates, args, t.gates);
  });
}

template <class T, XOrder Order>
Status launch_many_gradients(const ManyGradientTask& task, const CudaCall& call) {
  return task.terms.size() > 1 ? launch_many_gradient_of<T, Order, kMostManyTerms>(task, call)
                               : launch_many_gradient_of<T, Order>(task, call);
}

template <class T>
Status launch_many_gradient(const WeightGradient& g, const CudaCall& call) {
  std::array<GradTerm, kMostManyTerms> terms;
  for (size_t i = 0; i < g.pairs.size(); ++i) terms[i] = g.term(i);
  const ManyGradientTask task{.terms = std::span(terms).first(g.pairs.size()),
                              .walk = walk_on_device(g.layout, false),
                              .target = target_of(g),
                              .w = g.w,
                              .dgates = static_cast<float*>(g.dgates),
                              .gates = static_cast<int32_t>(g.layout.blocks),
                              .gate_blocks = 1};
  return call.problem.x_first ? launch_many_gradients<T, XOrder::features>(task, call)
                              : launch_many_gradients<T, XOrder::tokens>(task, call);
}

template <class T, XOrder Order, int Terms = 1>
Status prepare_many_gradient_of() {
  for (int32_t block : {32, 64, 128}) {
    BS_RETURN_IF_ERROR((with_gradient_kernel<T, Order, Terms>(block, gradient_form_of(block, false), [&]<class K>() {
      BS_RETURN_IF_ERROR(cuda::prepare(gradient_combine<typename K::OfOne>, 0));
      return cuda::prepare(many_gradient<K>, K::kSharedBytes);
    })));
  }
  BS_RETURN_IF_ERROR(cuda::prepare(gradient_of_gates, 0));
  BS_RETURN_IF_ERROR(cuda::prepare_tensor_maps());
  return prepare_gradient_units();
}

template <class T>
Status prepare_many_gradient() {
  BS_RETURN_IF_ERROR((prepare_many_gradient_of<T, XOrder::tokens>()));
  BS_RETURN_IF_ERROR((prepare_many_gradient_of<T, XOrder::tokens, kMostManyTerms>()));
  BS_RETURN_IF_ERROR((prepare_many_gradient_of<T, XOrder::features, kMostManyTerms>()));
  return prepare_many_gradient_of<T, XOrder::features>();
}

template <class T>
CudaGradientKernel make_many_gradient(DType dtype) {
  return {CudaKernel::many, dtype, prepare_many_gradient<T>, launch_many_gradient<T>};
}

}  // namespace
}  // namespace blocksparse::gemm
