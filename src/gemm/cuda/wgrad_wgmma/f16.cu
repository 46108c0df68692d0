#include "gemm/cuda/wgrad_wgmma/launch.cuh"

namespace blocksparse::gemm::wgrad_wgmma {

template <>
FamilyKernels kernels<DType::f16>() {
  return {.prepare = prepare<F16>, .gradient = launch<F16>};
}

}  // namespace blocksparse::gemm::wgrad_wgmma
