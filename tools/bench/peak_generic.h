// The most that FMA instructions of one instruction set do: independent chains in registers.
#pragma once

#include <chrono>

#include "cpu/simd.h"

namespace blocksparse::bench {
namespace {

// FLOP/s of one thread over about `seconds`.
template <class S>
double fma_rate(double seconds) {
  constexpr int L = kLanes<S>;
#if defined(__aarch64__)
  constexpr int kChains = 24;  // up to four pipes of latency 4
#else
  constexpr int kChains = 12;
#endif
  Vec<S, L> sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = Vec<S, L>{} + S(i);
  Vec<S, L> a = Vec<S, L>{} + S(1e-20);  // sums stay what they are
  asm volatile("" : "+m"(a));
  using Clock = std::chrono::steady_clock;
  double best = 0;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end) {
    constexpr int kSteps = 20000;
    const auto start = Clock::now();
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 24
      for (int i = 0; i < kChains; ++i) sum[i] += sum[i] * a;  // sum * a + b would copy b first on AArch64
    }
    const double spent = std::chrono::duration<double>(Clock::now() - start).count();
    const double rate = 2.0 * kSteps * kChains * L / spent;
    if (rate > best) best = rate;
  }
  for (auto& s : sum) asm volatile("" : "+m"(s));
  return best;
}

}  // namespace
}  // namespace blocksparse::bench
