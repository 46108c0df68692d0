#include "cpu/simd_neon.h"
#include "gemm/cpu/gradient.h"
#include "gemm/cpu/taps.h"

namespace blocksparse::gemm {

#define LINEAR_PRODUCT_neon(dtype, ...)                                                       \
  ProductKernel product_neon_##dtype() {                                                      \
    return make_product_with_taps<ProductConfig<DType::dtype, Tile{__VA_ARGS__}>>(Isa::neon); \
  }
#define LINEAR_GRADIENT_neon(dtype, ...)                                              \
  GradientKernel gradient_neon_##dtype() {                                            \
    return make_gradient<GradientConfig<DType::dtype, Tile{__VA_ARGS__}>>(Isa::neon); \
  }
#include "gemm/cpu/rows_of_isa.h"

}  // namespace blocksparse::gemm
