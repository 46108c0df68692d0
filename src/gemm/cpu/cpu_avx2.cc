#include "cpu/simd_avx2.h"
#include "gemm/cpu/gradient.h"
#include "gemm/cpu/taps.h"

namespace blocksparse::gemm {

#define LINEAR_PRODUCT_avx2(dtype, ...)                                                       \
  ProductKernel product_avx2_##dtype() {                                                      \
    return make_product_with_taps<ProductConfig<DType::dtype, Tile{__VA_ARGS__}>>(Isa::avx2); \
  }
#define LINEAR_GRADIENT_avx2(dtype, ...)                                              \
  GradientKernel gradient_avx2_##dtype() {                                            \
    return make_gradient<GradientConfig<DType::dtype, Tile{__VA_ARGS__}>>(Isa::avx2); \
  }
#include "gemm/cpu/rows_of_isa.h"

}  // namespace blocksparse::gemm
