#include "ops/linear/cuda_generic_gradient.h"
#include "ops/linear/cuda_generic_product.h"

namespace blocksparse::linear {
CudaProductKernel cuda_product_generic_f32() { return make_generic_product<float>(DType::f32); }
CudaGradientKernel cuda_gradient_generic_f32() { return make_generic_gradient<float>(DType::f32); }
}  // namespace blocksparse::linear
