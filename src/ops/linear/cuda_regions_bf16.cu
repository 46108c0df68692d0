#include "ops/linear/cuda_region_gradient.h"

namespace blocksparse::linear {
CudaGradientKernel cuda_gradient_regions_bf16() { return make_regions_gradient<Bf16>(DType::bf16); }
}  // namespace blocksparse::linear
