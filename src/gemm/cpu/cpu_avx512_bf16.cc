#include "cpu/simd_avx512_bf16.h"
#include "gemm/cpu/gradient.h"
#include "gemm/cpu/product.h"

namespace blocksparse::gemm {

#define BS_KERNEL_avx512_bf16(dtype, ...)                                                                         \
  ProductKernel product_avx512_bf16_##dtype() {                                                                   \
    return make_product<ProductConfig<DType::dtype, Tiles{__VA_ARGS__}.product, BFloat16Pair>>(Isa::avx512_bf16); \
  }
#include "cpu/kernels_of_isa.h"
#include "gemm/cpu/kernels.inc"
#undef BS_KERNEL_avx512_bf16

#define BS_KERNEL_avx512_bf16(dtype, ...)                                                                            \
  GradientKernel gradient_avx512_bf16_##dtype() {                                                                    \
    return make_gradient<GradientConfig<DType::dtype, Tiles{__VA_ARGS__}.gradient, BFloat16Pair>>(Isa::avx512_bf16); \
  }
#include "gemm/cpu/kernels.inc"

}  // namespace blocksparse::gemm
