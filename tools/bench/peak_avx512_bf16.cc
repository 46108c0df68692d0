#include "cpu/simd_avx512_bf16.h"
#include "peak_generic.h"

namespace blocksparse::bench {
double fma_rate_bf16_avx512_bf16(double seconds) {
  constexpr int kChains = 16, kSteps = 20000;
  Vec<float, 16> result{};
  Pairs16 a{};
  asm volatile("" : "+m"(a));
  const double rate = best_rate(seconds, 4.0 * 16 * kChains * kSteps, [&] {
    Vec<float, 16> sum[kChains];  // sums must differ, or the compiler would compute them once
    for (int i = 0; i < kChains; ++i) sum[i] = Vec<float, 16>{} + static_cast<float>(i);
    Pairs16 factor = a;
    for (int step = 0; step < kSteps; ++step) {
      factor = in_register(factor);  // a new value as far as the compiler knows
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) sum[i] = multiply_add<float, 16>(sum[i], factor, factor);
    }
    for (auto& s : sum) result += s;
  });
  asm volatile("" : "+m"(result));
  return rate;
}
}  // namespace blocksparse::bench
