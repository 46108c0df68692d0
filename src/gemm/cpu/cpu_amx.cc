#include "cpu/simd_amx.h"
#include "gemm/cpu/amx/gradient.h"
#include "gemm/cpu/amx/product.h"

namespace blocksparse::gemm {

#define LINEAR_PRODUCT_amx(dtype, ...)                                                \
  ProductKernel product_amx_##dtype() {                                               \
    return make_tile_product<TilesConfig<DType::dtype, Tile{__VA_ARGS__}>>(Isa::amx); \
  }
#define LINEAR_GRADIENT_amx(dtype, ...)                                                                 \
  GradientKernel gradient_amx_##dtype() {                                                               \
    return make_tile_gradient<GradientConfig<DType::dtype, Tile{__VA_ARGS__}, BFloat16Pair>>(Isa::amx); \
  }
#include "gemm/cpu/rows_of_isa.h"

}  // namespace blocksparse::gemm
