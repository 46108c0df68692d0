#include "gemm/cuda/wgrad_stream/kernel.cuh"

namespace blocksparse::gemm::wgrad_stream {

template <>
FamilyKernels kernels<DType::bf16>() {
  return {.prepare = prepare<Bf16>, .gradient = launch<Bf16>};
}

}  // namespace blocksparse::gemm::wgrad_stream
