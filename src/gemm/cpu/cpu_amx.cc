#include "cpu/simd_amx.h"
#include "gemm/cpu/amx/gradient.h"
#include "gemm/cpu/amx/product.h"

namespace blocksparse::gemm {

#define BS_KERNEL_amx(dtype, ...)                                                              \
  ProductKernel product_amx_##dtype() {                                                        \
    return make_tile_product<TilesConfig<DType::dtype, Tiles{__VA_ARGS__}.product>>(Isa::amx); \
  }
#include "cpu/kernels_of_isa.h"
#include "gemm/cpu/kernels.inc"
#undef BS_KERNEL_amx

#define BS_KERNEL_amx(dtype, ...)                                                                                 \
  GradientKernel gradient_amx_##dtype() {                                                                         \
    return make_tile_gradient<GradientConfig<DType::dtype, Tiles{__VA_ARGS__}.gradient, BFloat16Pair>>(Isa::amx); \
  }
#include "gemm/cpu/kernels.inc"

}  // namespace blocksparse::gemm
