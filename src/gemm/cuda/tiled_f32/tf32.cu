#include "gemm/cuda/tiled_f32/gradient.cuh"
#include "gemm/cuda/tiled_f32/product.cuh"

namespace blocksparse::gemm {

Status prepare_tiled_tf32() {
  BS_RETURN_IF_ERROR(prepare_tiled_product<true>());
  return prepare_tiled_gradient<true>();
}

Status launch_tiled_product_tf32(const Product& p, const CudaCall& call) { return launch_tiled_product<true>(p, call); }

Status launch_tiled_gradient_tf32(const WeightGradient& g, const CudaCall& call) {
  return launch_tiled_gradient<true>(g, call);
}

}  // namespace blocksparse::gemm
