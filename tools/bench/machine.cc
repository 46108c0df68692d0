#include "machine.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <map>
#include <vector>

namespace blocksparse::bench {

double fma_rate_f32_scalar(double seconds);
double fma_rate_f64_scalar(double seconds);
#if defined(__x86_64__)
double fma_rate_f32_avx2(double seconds);
double fma_rate_f64_avx2(double seconds);
double fma_rate_f32_avx512(double seconds);
double fma_rate_f64_avx512(double seconds);
double fma_rate_bf16_avx512_bf16(double seconds);
double fma_rate_bf16_amx(double seconds);
#elif defined(__aarch64__)
double fma_rate_f32_neon(double seconds);
double fma_rate_f64_neon(double seconds);
double fma_rate_bf16_neon_bf16(double seconds);
#endif

namespace {

double fma_rate(Isa isa, DType dtype, double seconds) {
  const bool wide = dtype == DType::f64;
#if defined(__x86_64__)
  if (isa == Isa::amx && dtype == DType::bf16) return fma_rate_bf16_amx(seconds);
  if (isa == Isa::avx512_bf16 && dtype == DType::bf16) return fma_rate_bf16_avx512_bf16(seconds);
  if (isa >= Isa::avx512 && isa <= Isa::amx) return wide ? fma_rate_f64_avx512(seconds) : fma_rate_f32_avx512(seconds);
  if (isa == Isa::avx2) return wide ? fma_rate_f64_avx2(seconds) : fma_rate_f32_avx2(seconds);
#elif defined(__aarch64__)
  if (isa == Isa::neon_bf16 && dtype == DType::bf16) return fma_rate_bf16_neon_bf16(seconds);
  if (isa >= Isa::neon && isa <= Isa::neon_bf16) return wide ? fma_rate_f64_neon(seconds) : fma_rate_f32_neon(seconds);
#endif
  return wide ? fma_rate_f64_scalar(seconds) : fma_rate_f32_scalar(seconds);
}

}  // namespace

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(std::min(line.find(": ") + 2, line.size()));
  }
  return "unknown CPU";
}

double Peak::measure(double seconds) const {
  double rate = 0;
#pragma omp parallel num_threads(threads) reduction(+ : rate)
  rate += fma_rate(isa, dtype, seconds);
  return rate;
}

double read_bandwidth(int threads) {
  static std::map<int, double> known;
  double& best = known[threads];
  if (best > 0) return best;
  const std::vector<uint64_t> buffer(size_t{32} << 20, 1);  // 256 MB
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    uint64_t sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum)
    for (size_t i = 0; i < buffer.size(); ++i) sum += buffer[i];
    const double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (sum == buffer.size()) best = std::max(best, static_cast<double>(buffer.size() * sizeof(uint64_t)) / spent);
  }
  return best;
}

}  // namespace blocksparse::bench
