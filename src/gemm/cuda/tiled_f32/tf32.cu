#include "gemm/cuda/tiled_f32/gradient.cuh"
#include "gemm/cuda/tiled_f32/product.cuh"

namespace blocksparse::gemm::tiled_f32 {

Status prepare_tf32() {
  BS_RETURN_IF_ERROR(prepare_product<true>());
  return prepare_gradient<true>();
}

Status launch_product_tf32(const Product& p, const CudaCall& call) { return launch_product<true>(p, call); }

Status launch_gradient_tf32(const WeightGradient& g, const CudaCall& call) { return launch_gradient<true>(g, call); }

}  // namespace blocksparse::gemm::tiled_f32
