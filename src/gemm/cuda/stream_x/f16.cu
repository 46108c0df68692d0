#include "gemm/cuda/stream_x/kernel.cuh"

namespace blocksparse::gemm {
CudaProductKernel cuda_product_sweep_f16() { return make_sweep_product<F16>(DType::f16); }
}  // namespace blocksparse::gemm
