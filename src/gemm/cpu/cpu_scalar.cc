#include "cpu/simd_scalar.h"
#include "gemm/cpu/gradient.h"
#include "gemm/cpu/taps.h"

namespace blocksparse::gemm {

#define BS_KERNEL_scalar(dtype, ...)                                                                     \
  ProductKernel product_scalar_##dtype() {                                                               \
    return make_product_with_taps<ProductConfig<DType::dtype, Tiles{__VA_ARGS__}.product>>(Isa::scalar); \
  }
#include "cpu/kernels_of_isa.h"
#include "gemm/cpu/kernels.inc"
#undef BS_KERNEL_scalar

#define BS_KERNEL_scalar(dtype, ...)                                                              \
  GradientKernel gradient_scalar_##dtype() {                                                      \
    return make_gradient<GradientConfig<DType::dtype, Tiles{__VA_ARGS__}.gradient>>(Isa::scalar); \
  }
#include "gemm/cpu/kernels.inc"

}  // namespace blocksparse::gemm
