#include "gemm/cuda/generic/gradient.cuh"
#include "gemm/cuda/generic/product.cuh"

namespace blocksparse::gemm::generic {

template <>
FamilyKernels kernels<DType::bf16>() {
  const auto prepare = [] {
    BS_RETURN_IF_ERROR(prepare_product<Bf16>());
    return prepare_gradient<Bf16>();
  };
  return {.prepare = prepare, .product = launch_product<Bf16>, .gradient = launch_gradient<Bf16>};
}

}  // namespace blocksparse::gemm::generic
