// Activations of 16-bit results, in straight code.
#pragma once

#include "blocksparse/ops.h"
#include "cuda/ptx/approximate.h"

namespace blocksparse::gemm {
namespace {

// Within 2e-5 of the result, which suffices for 16 bits, and 0 where that is below 1e-36. There is no branch, so the
// functions of many sums overlap. erfcf and a true division branch, and gelu then took longer than the product: 82 us
// beside 78 (b = 64, density .25, n = 4096).
template <Activation Act>
__device__ inline float approximately_activated(float z) {
  if constexpr (Act == Activation::relu) return z < 0 ? 0 : z;
  if constexpr (Act == Activation::silu) return z * ptx::rcp(1 + ptx::ex2(-1.44269504f * z));
  if constexpr (Act == Activation::gelu_tanh) {  // exponents are multiplied by log2(e)
    return z * ptx::rcp(1 + ptx::ex2(z * (-2.30220818f - 0.10294324f * z * z)));
  }
  if constexpr (Act == Activation::gelu) {
    // erfc(u) = t 2^(P(t) - u^2 log2(e)) with t = 1 / (1 + u / 2). P is a Chebyshev fit up to u = 10.
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

// The same, where an activation is not known before.
__device__ inline float approximately_activated(Activation activation, float z) {
  switch (activation) {
    case Activation::none: break;
    case Activation::relu: return approximately_activated<Activation::relu>(z);
    case Activation::gelu: return approximately_activated<Activation::gelu>(z);
    case Activation::silu: return approximately_activated<Activation::silu>(z);
    case Activation::gelu_tanh: return approximately_activated<Activation::gelu_tanh>(z);
  }
  return z;
}

}  // namespace
}  // namespace blocksparse::gemm
