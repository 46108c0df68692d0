// The rows of kernels.inc that belong to the including file: it has defined LINEAR_PRODUCT_<isa> and
// LINEAR_GRADIENT_<isa> for its own instruction set, the others expand to nothing. No include guard: it is an
// expansion.
#if !defined(LINEAR_PRODUCT_scalar)
#define LINEAR_PRODUCT_scalar(...)
#define LINEAR_GRADIENT_scalar(...)
#endif
#if !defined(LINEAR_PRODUCT_avx2)
#define LINEAR_PRODUCT_avx2(...)
#define LINEAR_GRADIENT_avx2(...)
#endif
#if !defined(LINEAR_PRODUCT_avx512)
#define LINEAR_PRODUCT_avx512(...)
#define LINEAR_GRADIENT_avx512(...)
#endif
#if !defined(LINEAR_PRODUCT_avx512_bf16)
#define LINEAR_PRODUCT_avx512_bf16(...)
#define LINEAR_GRADIENT_avx512_bf16(...)
#endif
#if !defined(LINEAR_PRODUCT_amx)
#define LINEAR_PRODUCT_amx(...)
#define LINEAR_GRADIENT_amx(...)
#endif
#if !defined(LINEAR_PRODUCT_neon)
#define LINEAR_PRODUCT_neon(...)
#define LINEAR_GRADIENT_neon(...)
#endif
#if !defined(LINEAR_PRODUCT_neon_bf16)
#define LINEAR_PRODUCT_neon_bf16(...)
#define LINEAR_GRADIENT_neon_bf16(...)
#endif

#define LINEAR_PRODUCT(isa, ...) LINEAR_PRODUCT_##isa(__VA_ARGS__)
#define LINEAR_GRADIENT(isa, ...) LINEAR_GRADIENT_##isa(__VA_ARGS__)
#include "gemm/cpu/kernels.inc"
