#include "gemm/cuda/wgrad_range/kernel.cuh"

namespace blocksparse::gemm::wgrad_range {

template <>
FamilyKernels kernels<DType::f16>() {
  return {.prepare = prepare<F16>, .gradient = launch<F16>};
}

}  // namespace blocksparse::gemm::wgrad_range
