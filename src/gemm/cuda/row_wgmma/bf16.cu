#include "gemm/cuda/row_wgmma/kernel.cuh"

namespace blocksparse::gemm::row_wgmma {

template <>
FamilyKernels kernels<DType::bf16>() {
  return {.prepare = prepare<Bf16>, .product = launch<Bf16>};
}

}  // namespace blocksparse::gemm::row_wgmma
