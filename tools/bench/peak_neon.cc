#include "cpu/simd_neon.h"
#include "peak_generic.h"

namespace blocksparse::bench {
double fma_rate_f32_neon(double seconds) { return fma_rate<float>(seconds); }
double fma_rate_f64_neon(double seconds) { return fma_rate<double>(seconds); }
}  // namespace blocksparse::bench
