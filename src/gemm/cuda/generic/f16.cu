#include "gemm/cuda/generic/gradient.cuh"
#include "gemm/cuda/generic/product.cuh"

namespace blocksparse::gemm {
CudaProductKernel cuda_product_generic_f16() { return make_generic_product<F16>(DType::f16); }
CudaGradientKernel cuda_gradient_generic_f16() { return make_generic_gradient<F16>(DType::f16); }
}  // namespace blocksparse::gemm
