#include "gemm/cuda/tiled_f32/gradient.cuh"
#include "gemm/cuda/tiled_f32/product.cuh"

namespace blocksparse::gemm::tiled_f32 {

template <>
FamilyKernels kernels<DType::f32>() {
  const auto prepare = [] {
    BS_RETURN_IF_ERROR(prepare_tables());
    BS_RETURN_IF_ERROR(prepare_product<false>());
    BS_RETURN_IF_ERROR(prepare_gradient<false>());
    return prepare_tf32();
  };
  const auto product = [](const Product& p, const CudaCall& call) {
    return call.problem.tf32 ? launch_product_tf32(p, call) : launch_product<false>(p, call);
  };
  const auto gradient = [](const WeightGradient& g, const CudaCall& call) {
    return call.problem.tf32 ? launch_gradient_tf32(g, call) : launch_gradient<false>(g, call);
  };
  return {.prepare = prepare, .product = product, .gradient = gradient};
}

}  // namespace blocksparse::gemm::tiled_f32
