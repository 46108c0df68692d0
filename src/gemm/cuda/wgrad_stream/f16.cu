#include "gemm/cuda/wgrad_stream/kernel.cuh"

namespace blocksparse::gemm::wgrad_stream {

template <>
FamilyKernels kernels<DType::f16>() {
  return {.prepare = prepare<F16>, .gradient = launch<F16>};
}

}  // namespace blocksparse::gemm::wgrad_stream
