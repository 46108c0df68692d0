// The rows of kernels.inc that belong to the including file, which has defined NORM_ROWS_<isa> for its own instruction
// set; the others expand to nothing. No include guard: it is an expansion.
#if !defined(NORM_ROWS_scalar)
#define NORM_ROWS_scalar(...)
#endif
#if !defined(NORM_ROWS_avx2)
#define NORM_ROWS_avx2(...)
#endif
#if !defined(NORM_ROWS_avx512)
#define NORM_ROWS_avx512(...)
#endif
#if !defined(NORM_ROWS_neon)
#define NORM_ROWS_neon(...)
#endif

#define NORM_ROWS(isa, dtype) NORM_ROWS_##isa(dtype)
#include "ops/norm/cpu/kernels.inc"
