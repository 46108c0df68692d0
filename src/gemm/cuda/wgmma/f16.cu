#include "gemm/cuda/wgmma/kernel.cuh"
#include "gemm/cuda/wgrad_wgmma/launch.cuh"

namespace blocksparse::gemm {
CudaProductKernel cuda_product_many_f16() { return make_many_product<F16>(DType::f16); }
CudaGradientKernel cuda_gradient_many_f16() { return make_many_gradient<F16>(DType::f16); }
}  // namespace blocksparse::gemm
