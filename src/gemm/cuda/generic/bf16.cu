#include "gemm/cuda/generic/gradient.cuh"
#include "gemm/cuda/generic/product.cuh"

namespace blocksparse::gemm {
CudaProductKernel cuda_product_generic_bf16() { return make_generic_product<Bf16>(DType::bf16); }
CudaGradientKernel cuda_gradient_generic_bf16() { return make_generic_gradient<Bf16>(DType::bf16); }
}  // namespace blocksparse::gemm
