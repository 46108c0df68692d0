#include "gemm/cuda/generic/gradient.cuh"
#include "gemm/cuda/generic/product.cuh"

namespace blocksparse::gemm {
CudaProductKernel cuda_product_generic_f32() { return make_generic_product<float>(DType::f32); }
CudaGradientKernel cuda_gradient_generic_f32() { return make_generic_gradient<float>(DType::f32); }
}  // namespace blocksparse::gemm
