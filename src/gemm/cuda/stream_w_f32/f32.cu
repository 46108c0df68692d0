#include "gemm/cuda/stream_w_f32/kernel.cuh"

namespace blocksparse::gemm::stream_w_f32 {

template <>
FamilyKernels kernels<DType::f32>() {
  return {.prepare = prepare, .product = launch};
}

}  // namespace blocksparse::gemm::stream_w_f32
