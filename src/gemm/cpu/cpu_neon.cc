#include "cpu/simd_neon.h"
#include "gemm/cpu/gradient.h"
#include "gemm/cpu/taps.h"

namespace blocksparse::gemm {

#define BS_KERNEL_neon(dtype, ...)                                                                     \
  ProductKernel product_neon_##dtype() {                                                               \
    return make_product_with_taps<ProductConfig<DType::dtype, Tiles{__VA_ARGS__}.product>>(Isa::neon); \
  }
#include "cpu/kernels_of_isa.h"
#include "gemm/cpu/kernels.inc"
#undef BS_KERNEL_neon

#define BS_KERNEL_neon(dtype, ...)                                                              \
  GradientKernel gradient_neon_##dtype() {                                                      \
    return make_gradient<GradientConfig<DType::dtype, Tiles{__VA_ARGS__}.gradient>>(Isa::neon); \
  }
#include "gemm/cpu/kernels.inc"

}  // namespace blocksparse::gemm
