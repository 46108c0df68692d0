#include "cpu/simd_scalar.h"
#include "ops/linear/cpu_gradient.h"
#include "ops/linear/cpu_taps.h"

namespace blocksparse::linear {

#define LINEAR_PRODUCT_scalar(dtype, ...)                                                       \
  ProductKernel product_scalar_##dtype() {                                                      \
    return make_product_with_taps<ProductConfig<DType::dtype, Tile{__VA_ARGS__}>>(Isa::scalar); \
  }
#define LINEAR_GRADIENT_scalar(dtype, ...)                                              \
  GradientKernel gradient_scalar_##dtype() {                                            \
    return make_gradient<GradientConfig<DType::dtype, Tile{__VA_ARGS__}>>(Isa::scalar); \
  }
#include "ops/linear/rows_of_isa.h"

}  // namespace blocksparse::linear
