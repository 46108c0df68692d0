// dW[i] = gate_i dy_out^T x_in for many tokens: outputs are wgmma's rows, inputs its columns, tokens the depth.
//   x [n, inputs]   dy [n, outputs]   dW [blocks, b, b]   16-bit elements, sums in f32; both operands as they lie
// Who does what
//   tables    one or two small kernels in front list jobs. A job is patches that share their dy: 64 outputs x up to 512
//             inputs, or 128 x 256
//   grid      one thread block an SM. Thread blocks take jobs in turn, so that all are at the same tokens at any time.
//             Jobs beyond the last whole wave are cut along the tokens. Cutting all of them evenly would take twice the
//             time, because x would come from DRAM
//   load      four warps share the boxes of each step: [64 tokens, 64 outputs] of dy and [64 tokens, 32 or 64 inputs]
//             of x; for b = 64 a step is 32 tokens
//   compute   two warpgroups: each has half of the patches, or for b = 128 half of the outputs
//   finish    registers to dW, eight elements a lane. Parts of jobs that were cut go to the workspace, and a kernel
//             behind adds them in the order of tokens. For gates' gradients each 16 x 8 of dW leaves a sum, which a
//             last kernel adds
#pragma once

#include <array>
#include <span>

#include "core/ceil_div.h"
#include "cuda/launch.h"
#include "gemm/cuda/wgrad_wgmma/kernel.cuh"

namespace blocksparse::gemm::wgrad_wgmma {
namespace {

// Calls body.template operator()<K>() with the kernel type K.
template <class T, wgmma::XOrder Order, int Terms, class Body>
Status with_kernel(int32_t block, const Form& form, Body body) {
  if (form.strip_outputs == 128) return body.template operator()<Kernel<T, 128, Order, Terms>>();
  if (block == 64) return body.template operator()<Kernel<T, 64, Order, Terms>>();
  return body.template operator()<Kernel<T, 32, Order, Terms>>();
}

inline Status map_of(const Activations& a, int32_t features, int32_t tokens, CUtensorMap& map) {
  const bool first = a.features_first();
  return cuda::make_tensor_map({.data = a.data,
                                .columns = first ? a.n : a.features,
                                .rows = first ? a.features : a.n,
                                .row_stride = first ? a.feature_stride : a.token_stride,
                                .box_columns = static_cast<uint32_t>(first ? tokens : features),
                                .box_rows = static_cast<uint32_t>(first ? features : tokens)},
                               map);
}

// What a launch sums, and where its result goes.
struct LaunchedSum {
  std::span<const GradTerm> terms;
  // The images from which x is gathered, or null. With images there is one term, and of its x only n and the features
  // count.
  const GatheredImages* images = nullptr;
  DeviceWalk walk;
  GradientTarget target;
  const void* w;
  float* dgates;        // or null
  int32_t gates;        // how many
  int32_t gate_blocks;  // of each
};

template <class K>
Status maps_of(const LaunchedSum& task, typename K::Maps& maps) {
  for (const GradTerm& term : task.terms) {
    if (term.x.n == 0) continue;  // a map of nothing is refused
    const int i = maps.steps.terms;
    if constexpr (K::order == wgmma::XOrder::images) {
      const GatheredImages& images = *task.images;
      maps.x[i].steps = wgmma::ImageSteps(images, images.deep());
      maps.x[i].taps = wgmma::TapSteps(images);
      BS_RETURN_IF_ERROR(
          cuda::make_image_map(wgmma::boxed(images, images.deep(), K::kPatch, K::kTokens), maps.x[i].map));
    } else {
      BS_RETURN_IF_ERROR(map_of(term.x, K::kPatch, K::kTokens, maps.x[i].map));
    }
    BS_RETURN_IF_ERROR(map_of(term.dy, 64, K::kTokens, maps.dy[i]));
    maps.steps.ends[i] = maps.steps.all() + static_cast<int32_t>(ceil_div(term.x.n, K::kTokens));
    ++maps.steps.terms;
  }
  return {};
}

template <class T, wgmma::XOrder Order, int Terms = 1>
Status launch_of(const LaunchedSum& t, const CudaCall& call) {
  const Form form = form_of(call.problem);
  const Tables tables = tables_in(call.problem, form, call.workspace.data);
  return with_kernel<T, Order, Terms>(call.problem.block, form, [&]<class K>() {
    const int32_t grid = std::min(call.card.multiprocessors, kMostGrid);
    typename K::Maps maps{};
    BS_RETURN_IF_ERROR(maps_of<K>(t, maps));
    const int32_t steps = maps.steps.all();
    BS_RETURN_IF_ERROR(make_jobs(call, form, t.walk, tables, grid, steps));
    const Args args{.tables = tables,
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
                                    wgrad_wgmma_sums<K>, maps, args));
    BS_RETURN_IF_ERROR(cuda::launch({.blocks = CombineForm::kBlocksPerSm * grid,
                                     .threads = CombineForm::kThreads,
                                     .stream = stream_of(call),
                                     .overlap = true},
                                    wgrad_wgmma_combine<typename K::OfOne>, args, grid));
    if (t.dgates == nullptr || t.gates == 0) return Status();
    return cuda::launch({.blocks = std::min<int64_t>(ceil_div(t.gates, 8), int64_t{16} * grid),
                         .threads = 256,
                         .stream = stream_of(call),
                         .overlap = true},
                        wgrad_wgmma_gates, args, t.gates);
  });
}

template <class T, wgmma::XOrder Order>
Status launch_list(const LaunchedSum& task, const CudaCall& call) {
  return task.terms.size() > 1 ? launch_of<T, Order, kTermsOfLaunch>(task, call) : launch_of<T, Order>(task, call);
}

template <class T>
Status launch(const WeightGradient& g, const CudaCall& call) {
  std::array<GradTerm, kTermsOfLaunch> terms;
  for (size_t i = 0; i < g.pairs.size(); ++i) terms[i] = g.term(i);
  const LaunchedSum task{.terms = std::span(terms).first(g.pairs.size()),
                         .walk = walk_on_device(g.layout, false),
                         .target = target_of(g),
                         .w = g.w,
                         .dgates = static_cast<float*>(g.dgates),
                         .gates = static_cast<int32_t>(g.layout.blocks),
                         .gate_blocks = 1};
  return call.problem.x_first ? launch_list<T, wgmma::XOrder::features>(task, call)
                              : launch_list<T, wgmma::XOrder::tokens>(task, call);
}

template <class T, wgmma::XOrder Order, int Terms = 1>
Status prepare_of() {
  for (int32_t block : {32, 64, 128}) {
    BS_RETURN_IF_ERROR((with_kernel<T, Order, Terms>(block, form_of(block, false), [&]<class K>() {
      BS_RETURN_IF_ERROR(cuda::prepare(wgrad_wgmma_combine<typename K::OfOne>, 0));
      return cuda::prepare(wgrad_wgmma_sums<K>, K::kSharedBytes);
    })));
  }
  BS_RETURN_IF_ERROR(cuda::prepare(wgrad_wgmma_gates, 0));
  BS_RETURN_IF_ERROR(cuda::prepare_tensor_maps());
  return prepare_jobs();
}

template <class T>
Status prepare() {
  BS_RETURN_IF_ERROR((prepare_of<T, wgmma::XOrder::tokens>()));
  BS_RETURN_IF_ERROR((prepare_of<T, wgmma::XOrder::tokens, kTermsOfLaunch>()));
  BS_RETURN_IF_ERROR((prepare_of<T, wgmma::XOrder::features, kTermsOfLaunch>()));
  return prepare_of<T, wgmma::XOrder::features>();
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_wgmma
