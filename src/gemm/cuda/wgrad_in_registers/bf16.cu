#include "gemm/cuda/wgrad_in_registers/kernel.cuh"

namespace blocksparse::gemm {
CudaGradientKernel cuda_gradient_regions_bf16() { return make_regions_gradient<Bf16>(DType::bf16); }
}  // namespace blocksparse::gemm
