#include "gemm/cuda/stream_w/rounds.cuh"

namespace blocksparse::gemm::stream_w {

template <>
FamilyKernels kernels<DType::bf16>() {
  return {.prepare = prepare<Bf16>, .product = launch<Bf16>};
}

}  // namespace blocksparse::gemm::stream_w
