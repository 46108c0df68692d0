#include "gemm/cuda/generic/gradient.cuh"
#include "gemm/cuda/generic/product.cuh"

namespace blocksparse::gemm::generic {

template <>
FamilyKernels kernels<DType::f16>() {
  const auto prepare = [] {
    BS_RETURN_IF_ERROR(prepare_product<F16>());
    return prepare_gradient<F16>();
  };
  return {.prepare = prepare, .product = launch_product<F16>, .gradient = launch_gradient<F16>};
}

}  // namespace blocksparse::gemm::generic
