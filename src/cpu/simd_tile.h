// One step of a tile whose sums take all registers: operands and a product. Include it after the header of an
// instruction set, whose multiply_add it uses.
#pragma once

#include "cpu/simd.h"

namespace blocksparse {
namespace {

// sum += a * b, for tiles that take all registers.
template <class S, int N, class V>
BS_INLINE void add_product(Vec<S, N>& sum, V a, V b) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  // Keeps sums in their registers. Without it GCC 12 puts some sums where an operand was, and at the end of an unrolled
  // loop 12 sums change places through the stack. wgrad does not need it: GCC compiles it without spills.
  if constexpr (sizeof(Vec<S, N>) == 32 && sizeof(S) == sizeof(float)) {
    asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return;
  }
#endif
  sum = multiply_add<S, N>(sum, a, b);
}

// Operands of add_product: a vector, and an element in all lanes. Where the order of products is fixed, the order of
// operands is fixed as well: GCC would move loads ahead of it, which then need a 17th register.
template <class P, int N>
BS_INLINE Vec<P, N> operand(const P* p) {
  return load_as<P, N>(p);
}
template <class P, int N>
BS_INLINE Vec<P, N> operand_in_all_lanes(const void* p) {
  P element;
  __builtin_memcpy(&element, p, sizeof(P));
  return broadcast<P, N>(element);
}
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
template <>
BS_INLINE Vec<float, 8> operand<float, 8>(const float* p) {
  struct Unaligned {
    float f[8];
  };
  Vec<float, 8> v;
  asm volatile("vmovups %1, %0" : "=x"(v) : "m"(*reinterpret_cast<const Unaligned*>(p)));
  return v;
}
template <>
BS_INLINE Vec<float, 8> operand_in_all_lanes<float, 8>(const void* p) {
  Vec<float, 8> v;
  asm volatile("vbroadcastss %1, %0" : "=x"(v) : "m"(*static_cast<const float*>(p)));
  return v;
}
#endif

}  // namespace
}  // namespace blocksparse
