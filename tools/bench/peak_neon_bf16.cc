#include "cpu/simd_neon_bf16.h"
#include "peak_generic.h"

namespace blocksparse::bench {
double fma_rate_bf16_neon_bf16(double seconds) {
  constexpr int kChains = 24, kSteps = 20000;  // keep four pipes of latency 6 busy
  Vec<float, 4> sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = Vec<float, 4>{} + static_cast<float>(i);
  Vec<uint32_t, 4> a{};
  asm volatile("" : "+m"(a));
  const double rate = best_rate(seconds, 4.0 * 4 * kChains * kSteps, [&] {
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 24
      for (int i = 0; i < kChains; ++i) sum[i] = multiply_add<float, 4>(sum[i], a, a);
    }
  });
  for (auto& s : sum) asm volatile("" : "+m"(s));
  return rate;
}
}  // namespace blocksparse::bench
