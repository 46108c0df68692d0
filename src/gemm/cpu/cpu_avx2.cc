#include "cpu/simd_avx2.h"
#include "gemm/cpu/gradient.h"
#include "gemm/cpu/taps.h"

namespace blocksparse::gemm {

#define BS_KERNEL_avx2(dtype, ...)                                                                     \
  ProductKernel product_avx2_##dtype() {                                                               \
    return make_product_with_taps<ProductConfig<DType::dtype, Tiles{__VA_ARGS__}.product>>(Isa::avx2); \
  }
#include "cpu/kernels_of_isa.h"
#include "gemm/cpu/kernels.inc"
#undef BS_KERNEL_avx2

#define BS_KERNEL_avx2(dtype, ...)                                                              \
  GradientKernel gradient_avx2_##dtype() {                                                      \
    return make_gradient<GradientConfig<DType::dtype, Tiles{__VA_ARGS__}.gradient>>(Isa::avx2); \
  }
#include "gemm/cpu/kernels.inc"

}  // namespace blocksparse::gemm
