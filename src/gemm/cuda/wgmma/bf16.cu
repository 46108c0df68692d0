#include "gemm/cuda/wgmma/kernel.cuh"
#include "gemm/cuda/wgrad_wgmma/launch.cuh"

namespace blocksparse::gemm {
CudaProductKernel cuda_product_many_bf16() { return make_many_product<Bf16>(DType::bf16); }
CudaGradientKernel cuda_gradient_many_bf16() { return make_many_gradient<Bf16>(DType::bf16); }
}  // namespace blocksparse::gemm
