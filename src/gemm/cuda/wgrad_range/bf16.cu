#include "gemm/cuda/wgrad_range/kernel.cuh"

namespace blocksparse::gemm::wgrad_range {

template <>
FamilyKernels kernels<DType::bf16>() {
  return {.prepare = prepare<Bf16>, .gradient = launch<Bf16>};
}

}  // namespace blocksparse::gemm::wgrad_range
