#include "gemm/cuda/stream_w/rounds.cuh"

namespace blocksparse::gemm {
CudaProductKernel cuda_product_few_bf16() { return make_few_product<Bf16>(DType::bf16); }
}  // namespace blocksparse::gemm
