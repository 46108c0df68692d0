#include "ops/linear/cuda_many.h"
#include "ops/linear/cuda_many_gradient.h"

namespace blocksparse::linear {
CudaProductKernel cuda_product_many_f16() { return make_many_product<F16>(DType::f16); }
CudaGradientKernel cuda_gradient_many_f16() { return make_many_gradient<F16>(DType::f16); }
}  // namespace blocksparse::linear
