// Advanced SIMD with bf16: vectors of 16 bytes, and sums of products of pairs. Denormal operands and results count as
// 0.
#pragma once

#define BS_VECTOR_BYTES 16
#include "cpu/simd.h"

namespace blocksparse {
namespace {

// Fills the first lane alone: bfdot by element reads it there, and filling all lanes is work for the pipes of products.
// GCC 12 would clear the others.
template <class P, int N>
  requires(N == 4)
BS_INLINE Vec<P, N> broadcast(BFloat16Pair pair) {
#if defined(__clang__)
  return Vec<P, N>{bits_as<uint32_t>(pair)};
#else
  Vec<P, N> v;
  asm("" : "=w"(v) : "0"(bits_as<float>(pair)));
  return v;
#endif
}

// bfdot: sum + (a.first * b.first + a.second * b.second), each product exact, both sums rounded to odd. a: a broadcast.
template <class S, int N>
BS_INLINE Vec<float, 4> multiply_add(Vec<float, 4> sum, Vec<uint32_t, 4> a, Vec<uint32_t, 4> b) {
  return bits_as<Vec<float, 4>>(
      vbfdotq_laneq_f32(bits_as<float32x4_t>(sum), bits_as<bfloat16x8_t>(b), bits_as<bfloat16x8_t>(a), 0));
}

// One instruction instead of eight. It rounds as FPCR says (to nearest) and keeps denormals.
template <>
BS_INLINE Vec<uint16_t, 4> bf16_of_float<4>(Vec<float, 4> v) {
  return bits_as<Vec<uint16_t, 4>>(vcvt_bf16_f32(bits_as<float32x4_t>(v)));
}

}  // namespace
}  // namespace blocksparse
