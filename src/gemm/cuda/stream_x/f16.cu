#include "gemm/cuda/stream_x/kernel.cuh"

namespace blocksparse::gemm::stream_x {

template <>
FamilyKernels kernels<DType::f16>() {
  return {.prepare = prepare<F16>, .product = launch<F16>};
}

}  // namespace blocksparse::gemm::stream_x
