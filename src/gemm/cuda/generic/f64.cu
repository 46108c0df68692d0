#include "gemm/cuda/generic/gradient.cuh"
#include "gemm/cuda/generic/product.cuh"

namespace blocksparse::gemm {
CudaProductKernel cuda_product_generic_f64() { return make_generic_product<double>(DType::f64); }
CudaGradientKernel cuda_gradient_generic_f64() { return make_generic_gradient<double>(DType::f64); }
}  // namespace blocksparse::gemm
