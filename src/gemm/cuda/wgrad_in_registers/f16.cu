#include "gemm/cuda/wgrad_in_registers/kernel.cuh"

namespace blocksparse::gemm::wgrad_in_registers {

template <>
FamilyKernels kernels<DType::f16>() {
  return {.prepare = prepare<F16>, .gradient = launch<F16>};
}

}  // namespace blocksparse::gemm::wgrad_in_registers
