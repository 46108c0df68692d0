// Which family of CUDA kernels a linear problem is given to, without its data.
#include "gemm/cuda/families.h"
#include "ops/linear/problem.h"

namespace blocksparse::linear {

std::string_view family_on(const cuda::Card& card, const LinearCase& c, const LayoutView& layout) {
  CudaProblem p = cuda_problem(c.pass, layout, c.dtype, c.n * (c.pass == Pass::wgrad ? c.pairs : 1));
  const auto in_rows = [&](Order order, int64_t features) {
    const int64_t stride = (order == Order::features_last ? features : c.n) + c.pad;
    return stride * size_of(c.dtype) % 16 == 0 && c.offset * size_of(c.dtype) % 16 == 0;
  };
  p.w_aligned = c.w_offset * size_of(c.dtype) % 16 == 0;
  p.x_in_rows = in_rows(c.x_order, p.inputs);
  p.x_first = c.x_order == Order::features_first;
  p.gated = c.gates;
  p.tf32 = c.tf32;
  if (c.pass == Pass::wgrad) {
    p.w_aligned = true;  // dW is an array of its own
    p.x_in_rows = p.x_in_rows && in_rows(c.y_order, p.outputs) && c.y_order == c.x_order;
    p.gated = c.dgates;
    p.pairs = c.pairs;
  }
  return choose_family(c.hidden > 0 ? as_glu(p) : p, card).name;
}

}  // namespace blocksparse::linear
