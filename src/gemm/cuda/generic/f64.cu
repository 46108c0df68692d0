#include "gemm/cuda/generic/gradient.cuh"
#include "gemm/cuda/generic/product.cuh"

namespace blocksparse::gemm::generic {

template <>
FamilyKernels kernels<DType::f64>() {
  const auto prepare = [] {
    BS_RETURN_IF_ERROR(prepare_product<double>());
    return prepare_gradient<double>();
  };
  return {.prepare = prepare, .product = launch_product<double>, .gradient = launch_gradient<double>};
}

}  // namespace blocksparse::gemm::generic
