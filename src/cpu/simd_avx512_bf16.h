// AVX-512 with bf16: vectors of 64 bytes, and sums of products of pairs. Denormal operands and results count as 0.
// BLOCKSPARSE_EMULATE does it in software.
#pragma once

#define BS_VECTOR_BYTES 64
#include "cpu/simd.h"

namespace blocksparse {
namespace {

using Pairs16 = Vec<uint32_t, 16>;

#if defined(BLOCKSPARSE_EMULATE)
// A bf16 at the top of each lane, with denormals as 0.
BS_INLINE Vec<float, 16> normal(Pairs16 bits) {
  return bits_as<Vec<float, 16>>((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
}
#endif

// vdpbf16ps: sum + a.first * b.first + a.second * b.second, each product exact.
template <class S, int N>
BS_INLINE Vec<float, 16> multiply_add(Vec<float, 16> sum, Pairs16 a, Pairs16 b) {
#if defined(BLOCKSPARSE_EMULATE)
  sum += normal(a & 0xffff0000) * normal(b & 0xffff0000);
  return sum + normal(a << 16) * normal(b << 16);
#else
  return bits_as<Vec<float, 16>>(_mm512_dpbf16_ps(bits_as<__m512>(sum), bits_as<__m512bh>(a), bits_as<__m512bh>(b)));
#endif
}
template <class S, int N>
BS_INLINE Vec<float, 8> multiply_add(Vec<float, 8> sum, Vec<uint32_t, 8> a, Vec<uint32_t, 8> b) {
#if defined(BLOCKSPARSE_EMULATE)
  Pairs16 wide_a{}, wide_b{};
  Vec<float, 16> wide{};
  __builtin_memcpy(&wide_a, &a, sizeof(a));
  __builtin_memcpy(&wide_b, &b, sizeof(b));
  __builtin_memcpy(&wide, &sum, sizeof(sum));
  wide = multiply_add<float, 16>(wide, wide_a, wide_b);
  __builtin_memcpy(&sum, &wide, sizeof(sum));
  return sum;
#else
  return bits_as<Vec<float, 8>>(_mm256_dpbf16_ps(bits_as<__m256>(sum), bits_as<__m256bh>(a), bits_as<__m256bh>(b)));
#endif
}

#if !defined(BLOCKSPARSE_EMULATE)
// One instruction instead of eight.
template <>
BS_INLINE Vec<uint16_t, 16> bf16_of_float<16>(Vec<float, 16> v) {
  return bits_as<Vec<uint16_t, 16>>(_mm512_cvtneps_pbh(bits_as<__m512>(v)));
}
#endif

}  // namespace
}  // namespace blocksparse
