#include "gemm/cuda/tiled_f32/gradient.cuh"
#include "gemm/cuda/tiled_f32/product.cuh"

namespace blocksparse::gemm {

CudaProductKernel cuda_product_tiled_f32() {
  const auto prepare = [] {
    BS_RETURN_IF_ERROR(prepare_tiled_tables());
    BS_RETURN_IF_ERROR(prepare_tiled_product<false>());
    return prepare_tiled_tf32();
  };
  const auto launch = [](const Product& p, const CudaCall& call) {
    return call.problem.tf32 ? launch_tiled_product_tf32(p, call) : launch_tiled_product<false>(p, call);
  };
  return {CudaKernel::tiled, DType::f32, prepare, launch};
}

CudaGradientKernel cuda_gradient_tiled_f32() {
  const auto launch = [](const WeightGradient& g, const CudaCall& call) {
    return call.problem.tf32 ? launch_tiled_gradient_tf32(g, call) : launch_tiled_gradient<false>(g, call);
  };
  return {CudaKernel::tiled, DType::f32, prepare_tiled_gradient<false>, launch};
}

}  // namespace blocksparse::gemm
