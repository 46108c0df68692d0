#include "ops/linear/cuda_generic_gradient.h"
#include "ops/linear/cuda_generic_product.h"

namespace blocksparse::linear {
CudaProductKernel cuda_product_generic_f64() { return make_generic_product<double>(DType::f64); }
CudaGradientKernel cuda_gradient_generic_f64() { return make_generic_gradient<double>(DType::f64); }
}  // namespace blocksparse::linear
