#include "gemm/cuda/stream_x/kernel.cuh"

namespace blocksparse::gemm::stream_x {

template <>
FamilyKernels kernels<DType::bf16>() {
  return {.prepare = prepare<Bf16>, .product = launch<Bf16>};
}

}  // namespace blocksparse::gemm::stream_x
