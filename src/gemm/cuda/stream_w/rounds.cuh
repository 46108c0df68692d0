// fprop and dgrad of few tokens, and of more tokens in rounds that share one workspace: see round_tokens().
#pragma once

#include "gemm/cuda/stream_w/kernel.cuh"

namespace blocksparse::gemm::stream_w {
namespace {

template <class T>
Activations tokens_of(Activations a, int64_t first, int64_t n) {
  if (a.data != nullptr) a.data = static_cast<const T*>(a.data) + first * a.token_stride;
  a.n = n;
  return a;
}

template <class T>
Status launch(const Product& p, const CudaCall& call) {
  const int64_t round = round_tokens(call.problem);
  Product part = p;
  CudaProblem problem = call.problem;
  for (int64_t first = 0; first < p.x.n; first += round) {
    problem.n = std::min(round, p.x.n - first);
    part.x = tokens_of<T>(p.x, first, problem.n), part.y = tokens_of<T>(p.y, first, problem.n);
    part.residual = tokens_of<T>(p.residual, first, problem.n);
    part.x_is_last = p.x_is_last || first > 0;
    BS_RETURN_IF_ERROR(launch_round<T>(part, {problem, call.card, call.workspace, call.stream}));
  }
  return {};
}

}  // namespace
}  // namespace blocksparse::gemm::stream_w
