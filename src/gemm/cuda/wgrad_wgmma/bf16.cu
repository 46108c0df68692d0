#include "gemm/cuda/wgrad_wgmma/launch.cuh"

namespace blocksparse::gemm::wgrad_wgmma {

template <>
FamilyKernels kernels<DType::bf16>() {
  return {.prepare = prepare<Bf16>, .gradient = launch<Bf16>};
}

}  // namespace blocksparse::gemm::wgrad_wgmma
