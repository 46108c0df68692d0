#include "gemm/cuda/w_in_smem/kernel.cuh"

namespace blocksparse::gemm::w_in_smem {

template <>
FamilyKernels kernels<DType::f16>() {
  return {.prepare = prepare<F16>, .product = launch<F16>};
}

}  // namespace blocksparse::gemm::w_in_smem
