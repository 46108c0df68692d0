#include "gemm/cuda/wgrad_stream/kernel.cuh"

namespace blocksparse::gemm {
CudaGradientKernel cuda_gradient_few_f16() { return make_few_gradient<F16>(DType::f16); }
}  // namespace blocksparse::gemm
