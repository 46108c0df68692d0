#include "cpu/simd_avx512_bf16.h"
#include "gemm/cpu/gradient.h"
#include "gemm/cpu/product.h"

namespace blocksparse::gemm {

#define LINEAR_PRODUCT_avx512_bf16(dtype, ...)                                                           \
  ProductKernel product_avx512_bf16_##dtype() {                                                          \
    return make_product<ProductConfig<DType::dtype, Tile{__VA_ARGS__}, BFloat16Pair>>(Isa::avx512_bf16); \
  }
#define LINEAR_GRADIENT_avx512_bf16(dtype, ...)                                                            \
  GradientKernel gradient_avx512_bf16_##dtype() {                                                          \
    return make_gradient<GradientConfig<DType::dtype, Tile{__VA_ARGS__}, BFloat16Pair>>(Isa::avx512_bf16); \
  }
#include "gemm/cpu/rows_of_isa.h"

}  // namespace blocksparse::gemm
