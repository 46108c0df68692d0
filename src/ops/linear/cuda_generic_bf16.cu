#include "ops/linear/cuda_generic_gradient.h"
#include "ops/linear/cuda_generic_product.h"

namespace blocksparse::linear {
CudaProductKernel cuda_product_generic_bf16() { return make_generic_product<Bf16>(DType::bf16); }
CudaGradientKernel cuda_gradient_generic_bf16() { return make_generic_gradient<Bf16>(DType::bf16); }
}  // namespace blocksparse::linear
