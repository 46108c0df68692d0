#include "cpu/simd_scalar.h"
#include "gemm/cpu/gradient.h"
#include "gemm/cpu/taps.h"

namespace blocksparse::gemm {

#define LINEAR_PRODUCT_scalar(dtype, ...)                                                       \
  ProductKernel product_scalar_##dtype() {                                                      \
    return make_product_with_taps<ProductConfig<DType::dtype, Tile{__VA_ARGS__}>>(Isa::scalar); \
  }
#define LINEAR_GRADIENT_scalar(dtype, ...)                                              \
  GradientKernel gradient_scalar_##dtype() {                                            \
    return make_gradient<GradientConfig<DType::dtype, Tile{__VA_ARGS__}>>(Isa::scalar); \
  }
#include "gemm/cpu/rows_of_isa.h"

}  // namespace blocksparse::gemm
