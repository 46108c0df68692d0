#include "gemm/cuda/wgrad_in_registers/kernel.cuh"

namespace blocksparse::gemm {
CudaGradientKernel cuda_gradient_regions_f16() { return make_regions_gradient<F16>(DType::f16); }
}  // namespace blocksparse::gemm
