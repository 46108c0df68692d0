#include "cpu/simd_neon_bf16.h"
#include "gemm/cpu/gradient.h"
#include "gemm/cpu/product.h"

namespace blocksparse::gemm {

#define LINEAR_PRODUCT_neon_bf16(dtype, ...)                                                           \
  ProductKernel product_neon_bf16_##dtype() {                                                          \
    return make_product<ProductConfig<DType::dtype, Tile{__VA_ARGS__}, BFloat16Pair>>(Isa::neon_bf16); \
  }
#define LINEAR_GRADIENT_neon_bf16(dtype, ...)                                                            \
  GradientKernel gradient_neon_bf16_##dtype() {                                                          \
    return make_gradient<GradientConfig<DType::dtype, Tile{__VA_ARGS__}, BFloat16Pair>>(Isa::neon_bf16); \
  }
#include "gemm/cpu/rows_of_isa.h"

}  // namespace blocksparse::gemm
