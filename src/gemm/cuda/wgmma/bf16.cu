#include "gemm/cuda/wgmma/kernel.cuh"

namespace blocksparse::gemm::wgmma {

template <>
FamilyKernels kernels<DType::bf16>() {
  return {.prepare = prepare<Bf16>, .product = launch<Bf16>};
}

}  // namespace blocksparse::gemm::wgmma
