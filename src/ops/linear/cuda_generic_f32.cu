#include "ops/linear/cuda_generic.h"

namespace blocksparse::linear {
CudaProductKernel cuda_product_generic_f32() { return make_generic_product<float>(DType::f32); }
CudaGradientKernel cuda_gradient_generic_f32() { return make_generic_gradient<float>(DType::f32); }
}  // namespace blocksparse::linear
