#include "gemm/cpu/kernels.h"

namespace blocksparse::gemm {

std::span<const ProductKernel> product_kernels() {
  static const ProductKernel kKernels[] = {
#define BS_KERNEL(isa, dtype, ...) product_##isa##_##dtype(),
#include "gemm/cpu/kernels.inc"
#undef BS_KERNEL
  };
  return kKernels;
}

std::span<const GradientKernel> gradient_kernels() {
  static const GradientKernel kKernels[] = {
#define BS_KERNEL(isa, dtype, ...) gradient_##isa##_##dtype(),
#include "gemm/cpu/kernels.inc"
#undef BS_KERNEL
  };
  return kKernels;
}

const ProductKernel* find_product_kernel(Isa isa, DType dtype) { return find_kernel(product_kernels(), isa, dtype); }
const GradientKernel* find_gradient_kernel(Isa isa, DType dtype) { return find_kernel(gradient_kernels(), isa, dtype); }

}  // namespace blocksparse::gemm
