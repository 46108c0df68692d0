#include "gemm/cuda/four_rows_wgmma/kernel.cuh"

namespace blocksparse::gemm::four_rows_wgmma {

template <>
FamilyKernels kernels<DType::bf16>() {
  return {.prepare = prepare<Bf16>, .product = launch<Bf16>};
}

}  // namespace blocksparse::gemm::four_rows_wgmma
