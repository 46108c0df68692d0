// Convolutions by the families wgmma and wgrad_wgmma, which gather x as they copy it. 16 bits, channels-last.
#pragma once

#include "gemm/cuda/wgmma/kernel.cuh"
#include "gemm/cuda/wgrad_wgmma/launch.cuh"
#include "ops/conv/cuda/driver.h"
#include "ops/conv/cuda/gather/taps.h"

namespace blocksparse::conv {
namespace {

using gemm::GatheredImages;
using gemm::wgmma::XOrder;

template <class T>
Status launch_phase(const Product& p, const Phase& phase, const CudaCall& call) {
  gemm::CudaProblem problem = gathered_problem(p);
  const int64_t rows = problem.output_blocks(), taps = p.gather.taps();
  gemm::Product product = as_product(p);
  product.layout.blocks = problem.blocks;  // of all taps, because copies of W are found by their numbers
  product.x.n = product.y.n = problem.n = phase.tokens();
  problem.blocks = p.layout.blocks * phase.taps.taps();
  problem.inputs = std::max<int64_t>(1, phase.taps.taps()) * phase.x.inputs_of_tap;
  const auto list = list_taps(tap_list(phase, p.gather, p.layout, p.by_in, rows, p.gates), call.workspace.data,
                              static_cast<cudaStream_t>(call.stream));
  if (!list.ok()) return list.status();
  const gemm::wgmma::Images images{&phase.x, phase_count(p.gather) == 1 ? nullptr : &phase.y};
  return gemm::wgmma::launch_of<T, XOrder::images>(
      product, {list->walk, list->gates, images},
      {problem, call.card, after_taps(call.workspace, rows, p.layout.blocks, taps), call.stream});
}

template <class T>
Status launch_gather_product(const Product& p, const CudaCall& call) {
  for (int64_t i = 0; i < phase_count(p.gather); ++i) {
    const Phase phase = phase_of(p.gather, p.x, p.y, p.layout.block_size, i);
    if (phase.tokens() > 0) BS_RETURN_IF_ERROR(launch_phase<T>(p, phase, call));
  }
  return {};
}

template <class T>
Status launch_gather_gradient(const WeightGradient& g, const CudaCall& call) {
  const gemm::CudaProblem problem = gathered_problem(g);
  const int64_t taps = g.gather.taps(), rows = problem.output_blocks();
  const Phase phase = phase_of(g.gather, g.columns, g.rows, g.layout.block_size, 0);
  const auto list = list_taps(tap_list(phase, g.gather, g.layout, false, rows, g.gates), call.workspace.data,
                              static_cast<cudaStream_t>(call.stream));
  if (!list.ok()) return list.status();
  gemm::GradTerm term{.x = as_tokens(g.columns), .dy = as_tokens(g.rows)};
  term.x.n = problem.n;
  return gemm::wgrad_wgmma::launch_of<T, XOrder::images>(
      {.terms = {&term, 1},
       .images = &phase.x,
       .walk = list->walk,
       .target = {list->gates, g.dw, g.dw_dtype == DType::f32, g.accumulate},
       .w = g.w,
       .dgates = static_cast<float*>(g.dgates),
       .gates = static_cast<int32_t>(g.layout.blocks),
       .gate_blocks = static_cast<int32_t>(taps)},
      {problem, call.card, after_taps(call.workspace, rows, g.layout.blocks, taps), call.stream});
}

template <class T>
Status prepare_gather() {
  BS_RETURN_IF_ERROR(prepare_taps());
  BS_RETURN_IF_ERROR((gemm::wgmma::prepare_of<T, XOrder::images>()));
  return gemm::wgrad_wgmma::prepare_of<T, XOrder::images>();
}

template <class T>
CudaKernels make_gather(DType dtype) {
  return {CudaWay::gather, dtype, prepare_gather<T>, launch_gather_product<T>, launch_gather_gradient<T>};
}

}  // namespace
}  // namespace blocksparse::conv
