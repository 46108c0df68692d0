#include "cpu/simd_avx512_bf16.h"
#include "peak_generic.h"

namespace blocksparse::bench {
double fma_rate_bf16_avx512_bf16(double seconds) {
  constexpr int kChains = 16, kSteps = 20000;
  Vec<float, 16> sum[kChains] = {};
  Pairs16 a{};
  asm volatile("" : "+m"(a));
  const double rate = best_rate(seconds, 4.0 * 16 * kChains * kSteps, [&] {
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) sum[i] = multiply_add<float, 16>(sum[i], a, a);
      asm volatile("" : "+m"(a));
    }
  });
  for (auto& s : sum) asm volatile("" : "+m"(s));
  return rate;
}
}  // namespace blocksparse::bench
