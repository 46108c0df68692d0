#include "ops/linear/cuda_few.h"

namespace blocksparse::linear {
namespace {

Activations tokens_of(Activations a, int64_t first, int64_t n) {
  if (a.data != nullptr) a.data = static_cast<const float*>(a.data) + first * a.token_stride;
  a.n = n;
  return a;
}

}  // namespace

Status prepare_few_tf32() { return prepare_few<float>(); }

// In rounds, all in the same workspace.
Status launch_few_tf32(const Product& p, const CudaCall& call) {
  Product part = p;
  CudaProblem problem = call.problem;
  for (int64_t first = 0; first < p.x.n; first += kMostFewTokens) {
    problem.n = std::min(kMostFewTokens, p.x.n - first);
    part.x = tokens_of(p.x, first, problem.n), part.y = tokens_of(p.y, first, problem.n);
    part.residual = tokens_of(p.residual, first, problem.n);
    part.x_is_last = p.x_is_last || first > 0;
    BS_RETURN_IF_ERROR(launch_few<float>(part, {problem, call.card, call.workspace, call.stream}));
  }
  return {};
}

}  // namespace blocksparse::linear
