#include "gemm/cuda/stream_w/rounds.cuh"

namespace blocksparse::gemm::stream_w {

template <>
FamilyKernels kernels<DType::f16>() {
  return {.prepare = prepare<F16>, .product = launch<F16>};
}

}  // namespace blocksparse::gemm::stream_w
