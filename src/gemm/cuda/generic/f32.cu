#include "gemm/cuda/generic/gradient.cuh"
#include "gemm/cuda/generic/product.cuh"

namespace blocksparse::gemm::generic {

template <>
FamilyKernels kernels<DType::f32>() {
  const auto prepare = [] {
    BS_RETURN_IF_ERROR(prepare_product<float>());
    return prepare_gradient<float>();
  };
  return {.prepare = prepare, .product = launch_product<float>, .gradient = launch_gradient<float>};
}

}  // namespace blocksparse::gemm::generic
