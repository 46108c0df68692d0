#include "gemm/cuda/wgrad_block/kernel.cuh"

namespace blocksparse::gemm::wgrad_block {

template <>
FamilyKernels kernels<DType::f16>() {
  return {.prepare = prepare<F16>, .gradient = launch<F16>};
}

}  // namespace blocksparse::gemm::wgrad_block
