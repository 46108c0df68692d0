#include "gemm/cuda/stream_w/rounds.cuh"

namespace blocksparse::gemm::stream_w {

template <>
FamilyKernels kernels<DType::f32>() {
  return {.prepare = prepare<float>, .product = launch<float>};
}

}  // namespace blocksparse::gemm::stream_w
