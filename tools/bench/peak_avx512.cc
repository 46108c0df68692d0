#include "cpu/simd_avx512.h"
#include "peak_generic.h"

namespace blocksparse::bench {
double fma_rate_f32_avx512(double seconds) { return fma_rate<float>(seconds); }
double fma_rate_f64_avx512(double seconds) { return fma_rate<double>(seconds); }
}  // namespace blocksparse::bench
