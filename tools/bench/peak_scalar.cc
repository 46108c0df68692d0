#include "cpu/simd_scalar.h"
#include "peak_generic.h"

namespace blocksparse::bench {
double fma_rate_f32_scalar(double seconds) { return fma_rate<float>(seconds); }
double fma_rate_f64_scalar(double seconds) { return fma_rate<double>(seconds); }
}  // namespace blocksparse::bench
