#include "gemm/cpu/kernels.h"

#include <vector>

namespace blocksparse::gemm {

std::span<const ProductKernel> product_kernels() {
  static const std::vector<ProductKernel> kernels = {
#define LINEAR_PRODUCT(isa, dtype, ...) product_##isa##_##dtype(),
#define LINEAR_GRADIENT(...)
#include "gemm/cpu/kernels.inc"
#undef LINEAR_PRODUCT
#undef LINEAR_GRADIENT
  };
  return kernels;
}

std::span<const GradientKernel> gradient_kernels() {
  static const std::vector<GradientKernel> kernels = {
#define LINEAR_PRODUCT(...)
#define LINEAR_GRADIENT(isa, dtype, ...) gradient_##isa##_##dtype(),
#include "gemm/cpu/kernels.inc"
#undef LINEAR_PRODUCT
#undef LINEAR_GRADIENT
  };
  return kernels;
}

const ProductKernel* find_product_kernel(Isa isa, DType dtype) { return find_kernel(product_kernels(), isa, dtype); }
const GradientKernel* find_gradient_kernel(Isa isa, DType dtype) { return find_kernel(gradient_kernels(), isa, dtype); }

}  // namespace blocksparse::gemm
