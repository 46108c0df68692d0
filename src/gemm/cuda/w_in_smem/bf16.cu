#include "gemm/cuda/w_in_smem/kernel.cuh"

namespace blocksparse::gemm::w_in_smem {

template <>
FamilyKernels kernels<DType::bf16>() {
  return {.prepare = prepare<Bf16>, .product = launch<Bf16>};
}

}  // namespace blocksparse::gemm::w_in_smem
