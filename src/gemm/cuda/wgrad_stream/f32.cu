#include "gemm/cuda/wgrad_stream/kernel.cuh"

namespace blocksparse::gemm {
// Where operands may be rounded to tf32.
CudaGradientKernel cuda_gradient_few_f32() { return make_few_gradient<float>(DType::f32); }
}  // namespace blocksparse::gemm
