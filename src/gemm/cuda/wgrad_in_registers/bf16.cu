#include "gemm/cuda/wgrad_in_registers/kernel.cuh"

namespace blocksparse::gemm::wgrad_in_registers {

template <>
FamilyKernels kernels<DType::bf16>() {
  return {.prepare = prepare<Bf16>, .gradient = launch<Bf16>};
}

}  // namespace blocksparse::gemm::wgrad_in_registers
