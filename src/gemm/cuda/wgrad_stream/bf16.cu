#include "gemm/cuda/wgrad_stream/kernel.cuh"

namespace blocksparse::gemm {
CudaGradientKernel cuda_gradient_few_bf16() { return make_few_gradient<Bf16>(DType::bf16); }
}  // namespace blocksparse::gemm
