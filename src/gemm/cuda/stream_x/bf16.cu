#include "gemm/cuda/stream_x/kernel.cuh"

namespace blocksparse::gemm {
CudaProductKernel cuda_product_sweep_bf16() { return make_sweep_product<Bf16>(DType::bf16); }
}  // namespace blocksparse::gemm
