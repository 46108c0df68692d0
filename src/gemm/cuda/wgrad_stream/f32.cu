#include "gemm/cuda/wgrad_stream/kernel.cuh"

namespace blocksparse::gemm::wgrad_stream {

template <>
FamilyKernels kernels<DType::f32>() {
  return {.prepare = prepare<float>, .gradient = launch<float>};
}

}  // namespace blocksparse::gemm::wgrad_stream
