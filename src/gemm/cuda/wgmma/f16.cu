#include "gemm/cuda/wgmma/kernel.cuh"

namespace blocksparse::gemm::wgmma {

template <>
FamilyKernels kernels<DType::f16>() {
  return {.prepare = prepare<F16>, .product = launch<F16>};
}

}  // namespace blocksparse::gemm::wgmma
