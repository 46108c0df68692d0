#include "ops/linear/cuda_few_gradient.h"

namespace blocksparse::linear {
CudaGradientKernel cuda_gradient_few_bf16() { return make_few_gradient<Bf16>(DType::bf16); }
}  // namespace blocksparse::linear
