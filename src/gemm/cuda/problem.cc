// Derives from layouts and calls what the choice of a CUDA kernel depends on.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/index.h"
#include "gemm/cuda/families.h"

namespace blocksparse::gemm {

CudaProblem cuda_problem(Pass pass, const LayoutView& layout, DType dtype, int64_t n) {
  CudaProblem p{.pass = pass,
                .dtype = dtype,
                .block = layout.block_size,
                .n = n,
                .inputs = layout.in_features,
                .outputs = layout.out_features,
                .blocks = layout.blocks};
  p.uneven = pass == Pass::wgrad && layout.cut_by_out;
  if (pass == Pass::wgrad) return p;
  p.by_in = layout.transposed != (pass == Pass::dgrad);
  if (p.by_in) std::swap(p.inputs, p.outputs);
  const bool cut = p.by_in ? layout.cut_by_in : layout.cut_by_out;
  p.slots = cut ? most_slots(p.output_blocks(), p.input_blocks(), p.blocks) : 0;
  return p;
}

CudaProblem as_glu(CudaProblem p) {
  p.glu = true;
  p.may_fill = false;
  return p;
}

namespace {

bool begins_at(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<size_t>(bytes) == 0;
}

// Whether rows, of tokens or of features, begin at multiples of 16 bytes and do not overlap.
bool in_rows(const Activations& a, DType dtype) {
  const int64_t stride = a.features_first() ? a.feature_stride : a.token_stride;
  return begins_at(a.data, 16) && stride * size_of(dtype) % 16 == 0 &&
         stride >= (a.features_first() ? a.n : a.features);
}

}  // namespace

CudaProblem problem_of(const Product& p, Math math) {
  LayoutView plain = p.layout;
  plain.transposed = false;
  CudaProblem problem = cuda_problem(p.by_in ? Pass::dgrad : Pass::fprop, plain, p.dtype, p.x.n);
  problem.w_aligned = begins_at(p.w, 16);
  problem.x_in_rows = in_rows(p.x, p.dtype);
  problem.x_first = p.x.features_first();
  problem.gated = p.gates != nullptr;
  problem.tf32 = in_tf32(p.dtype, math);
  problem.quarters_are_alike = p.quarters_are_alike;
  return p.glu ? as_glu(problem) : problem;
}

CudaProblem problem_of(const WeightGradient& g, Math math) {
  CudaProblem problem = cuda_problem(Pass::wgrad, g.layout, g.dtype, 0);
  problem.w_aligned = begins_at(g.dw, 2 * size_of(g.dw_dtype));
  problem.gated = g.dgates != nullptr;
  problem.pairs = static_cast<int64_t>(g.pairs.size());
  problem.tf32 = in_tf32(g.dtype, math);
  for (size_t i = 0; i < g.pairs.size(); ++i) {
    const GradTerm term = g.term(i);
    if (term.x.n == 0) continue;  // strides of an empty tensor mean nothing
    if (problem.n == 0) problem.x_first = term.x.features_first();
    for (const Activations& a : {term.x, term.dy}) {
      problem.x_in_rows = problem.x_in_rows && in_rows(a, g.dtype) && a.features_first() == problem.x_first;
    }
    problem.n += term.x.n;
  }
  return problem;
}

}  // namespace blocksparse::gemm
