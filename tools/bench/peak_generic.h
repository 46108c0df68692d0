// The most that FMA instructions of one instruction set can do: independent chains in registers.
#pragma once

#include <chrono>

#include "cpu/simd.h"

namespace blocksparse::bench {
namespace {

// The best rate of many calls of steps() within about `seconds`, in operations/s. A call does `operations`.
template <class Steps>
double best_rate(double seconds, double operations, Steps steps) {
  using Clock = std::chrono::steady_clock;
  double best = 0;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end) {
    const auto start = Clock::now();
    steps();
    const double rate = operations / std::chrono::duration<double>(Clock::now() - start).count();
    if (rate > best) best = rate;
  }
  return best;
}

// FLOP/s of one thread.
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
  Vec<S, L> a = Vec<S, L>{} + S(1e-20);  // so small that sums stay as they are
  asm volatile("" : "+m"(a));
  constexpr int kSteps = 20000;
  const double best = best_rate(seconds, 2.0 * kSteps * kChains * L, [&] {
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 24
      for (int i = 0; i < kChains; ++i) sum[i] += sum[i] * a;  // sum * a + b would copy b first on AArch64
    }
  });
  for (auto& s : sum) asm volatile("" : "+m"(s));
  return best;
}

}  // namespace
}  // namespace blocksparse::bench
