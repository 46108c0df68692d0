#include "cpu/simd_avx512.h"
#include "gemm/cpu/gradient.h"
#include "gemm/cpu/taps.h"

namespace blocksparse::gemm {

#define LINEAR_PRODUCT_avx512(dtype, ...)                                                       \
  ProductKernel product_avx512_##dtype() {                                                      \
    return make_product_with_taps<ProductConfig<DType::dtype, Tile{__VA_ARGS__}>>(Isa::avx512); \
  }
#define LINEAR_GRADIENT_avx512(dtype, ...)                                              \
  GradientKernel gradient_avx512_##dtype() {                                            \
    return make_gradient<GradientConfig<DType::dtype, Tile{__VA_ARGS__}>>(Isa::avx512); \
  }
#include "gemm/cpu/rows_of_isa.h"

}  // namespace blocksparse::gemm
