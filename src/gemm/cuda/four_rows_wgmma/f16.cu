#include "gemm/cuda/four_rows_wgmma/kernel.cuh"

namespace blocksparse::gemm::four_rows_wgmma {

template <>
FamilyKernels kernels<DType::f16>() {
  return {.prepare = prepare<F16>, .product = launch<F16>};
}

}  // namespace blocksparse::gemm::four_rows_wgmma
