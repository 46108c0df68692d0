#include "cpu/simd_avx512.h"
#include "gemm/cpu/gradient.h"
#include "gemm/cpu/taps.h"

namespace blocksparse::gemm {

#define BS_KERNEL_avx512(dtype, ...)                                                                     \
  ProductKernel product_avx512_##dtype() {                                                               \
    return make_product_with_taps<ProductConfig<DType::dtype, Tiles{__VA_ARGS__}.product>>(Isa::avx512); \
  }
#include "cpu/kernels_of_isa.h"
#include "gemm/cpu/kernels.inc"
#undef BS_KERNEL_avx512

#define BS_KERNEL_avx512(dtype, ...)                                                              \
  GradientKernel gradient_avx512_##dtype() {                                                      \
    return make_gradient<GradientConfig<DType::dtype, Tiles{__VA_ARGS__}.gradient>>(Isa::avx512); \
  }
#include "gemm/cpu/kernels.inc"

}  // namespace blocksparse::gemm
