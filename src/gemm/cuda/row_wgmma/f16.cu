#include "gemm/cuda/row_wgmma/kernel.cuh"

namespace blocksparse::gemm::row_wgmma {

template <>
FamilyKernels kernels<DType::f16>() {
  return {.prepare = prepare<F16>, .product = launch<F16>};
}

}  // namespace blocksparse::gemm::row_wgmma
