#include "ops/linear/kernels.h"

#include <vector>

namespace blocksparse::linear {

std::span<const ProductKernel> product_kernels() {
  static const std::vector<ProductKernel> kernels = {
#define LINEAR_PRODUCT(isa, dtype, ...) product_##isa##_##dtype(),
#define LINEAR_GRADIENT(...)
#include "ops/linear/kernels.inc"
#undef LINEAR_PRODUCT
#undef LINEAR_GRADIENT
  };
  return kernels;
}

std::span<const GradientKernel> gradient_kernels() {
  static const std::vector<GradientKernel> kernels = {
#define LINEAR_PRODUCT(...)
#define LINEAR_GRADIENT(isa, dtype, ...) gradient_##isa##_##dtype(),
#include "ops/linear/kernels.inc"
#undef LINEAR_PRODUCT
#undef LINEAR_GRADIENT
  };
  return kernels;
}

namespace {
template <class Kernel>
const Kernel* find(std::span<const Kernel> kernels, Isa isa, DType dtype) {
  for (; isa != Isa::reference; isa = next_below(isa)) {
    for (const Kernel& kernel : kernels) {
      if (kernel.isa == isa && kernel.dtype == dtype) return &kernel;
    }
  }
  return nullptr;
}
}  // namespace

const ProductKernel* find_product_kernel(Isa isa, DType dtype) { return find(product_kernels(), isa, dtype); }
const GradientKernel* find_gradient_kernel(Isa isa, DType dtype) { return find(gradient_kernels(), isa, dtype); }

}  // namespace blocksparse::linear
