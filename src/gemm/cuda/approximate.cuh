// Activations of results of 16 bits, by straight code.
#pragma once

#include "blocksparse/ops.h"
#include "cuda/ptx/approximate.h"

namespace blocksparse::gemm {
namespace {

// For 16 bits: within 1e-5 of the result, without a branch, so that those of many sums overlap. erfcf and a true
// division have one, and gelu then took longer than the product (b = 64, density .25, n = 4096: 82 us beside 78).
template <Activation Act>
__device__ inline float approximately_activated(float z) {
  if constexpr (Act == Activation::relu) return z < 0 ? 0 : z;
  if constexpr (Act == Activation::silu) return z * ptx::rcp(1 + ptx::ex2(-1.44269504f * z));
  if constexpr (Act == Activation::gelu_tanh) {  // exponents times log2(e)
    return z * ptx::rcp(1 + ptx::ex2(z * (-2.30220818f - 0.10294324f * z * z)));
  }
  if constexpr (Act == Activation::gelu) {
    // erfc(u) = t 2^(P(t) - u^2 log2(e)) with t = 1 / (1 + u / 2), P fitted by Chebyshev polynomials to u = 10.
    const float u = fabsf(z) * 0.707106781f, t = ptx::rcp(1 + 0.5f * u);
    float power = 0.332664911f;
    power = power * t - 1.0313045f;
    power = power * t + 0.694324586f;
    power = power * t + 0.361573871f;
    power = power * t + 1.47012405f;
    power = power * t - 1.82737108f;
    const float tail = 0.5f * t * ptx::ex2(power - u * u * 1.44269504f);  // Phi(-|z|)
    return z < 0 ? z * tail : z - fminf(z, 1e4f) * tail;  // tail is 0 long before 1e4, and Inf stays Inf
  }
  return z;
}

}  // namespace
}  // namespace blocksparse::gemm
