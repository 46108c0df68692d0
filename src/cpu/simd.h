// Vectors of one width, from the compiler's vector extensions (GCC and Clang). simd_<isa>.h sets the width and includes
// this file. Everything here and in what builds on it is in an unnamed namespace: each ISA file keeps its own copy, and
// the linker cannot put a body compiled for AVX-512 into a path that an older CPU takes. For this reason ISA files also
// call no inline function of the standard library.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <utility>

#include "blocksparse/dtype.h"

#ifndef BS_VECTOR_BYTES
#error "include simd_<isa>.h, which sets BS_VECTOR_BYTES"
#endif

#define BS_INLINE inline __attribute__((always_inline))

namespace blocksparse {
namespace {

inline constexpr int kVectorBytes = BS_VECTOR_BYTES;

template <class T, int N>
struct VecOf {
  typedef T Type __attribute__((vector_size(sizeof(T) * N)));
};
template <class T, int N>
using Vec = typename VecOf<T, N>::Type;

template <class T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Two neighbours of a sum of products, which some instructions multiply together. As a lane of a vector it is its 32
// bits.
struct BFloat16Pair {
  uint16_t first, second;
};
template <int N>
struct VecOf<BFloat16Pair, N> {
  typedef uint32_t Type __attribute__((vector_size(4 * N)));
};

template <DType D>
struct ElementOf;
template <>
struct ElementOf<DType::f32> {
  using Type = float;
};
template <>
struct ElementOf<DType::f64> {
  using Type = double;
};
template <>
struct ElementOf<DType::bf16> {
  using Type = BFloat16;
};
template <>
struct ElementOf<DType::f16> {
  using Type = Float16;
};
template <DType D>
using Element = typename ElementOf<D>::Type;
template <DType D>
using Sum = Element<sum_dtype(D)>;

template <class T>
constexpr BS_INLINE T least(T a, T b) {
  return a < b ? a : b;
}

// The bits of a vector, seen as another type of that size.
template <class To, class From>
BS_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// Keeps a loaded value in a register. Without it GCC loads the value again in each instruction that uses it, and the
// load ports bound the loop: Zen 3, operands in L1, 50 % of FMA peak without, 80 % with.
template <class V>
BS_INLINE V in_register(V v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));  // any of the 32 registers
#elif defined(__x86_64__) && !defined(BLOCKSPARSE_EMULATE)
  asm("" : "+x"(v));
#endif
  return v;
}

// Steps a pointer once a row. Without it GCC keeps one pointer for each unrolled row and spills them.
template <class S>
BS_INLINE const S* next_row(const S* p) {
  asm("" : "+r"(p));
  return p;
}

template <class S, int N>
BS_INLINE Vec<S, N> broadcast(S s) {
  return s - Vec<S, N>{};  // s + 0 would have to turn -0 into 0
}

template <class P, int N>
BS_INLINE Vec<P, N> broadcast(BFloat16Pair pair) {
  return broadcast<uint32_t, N>(bits_as<uint32_t>(pair));
}

// sum + a * b, for vectors of the type of sums. Instruction sets add overloads for what else they multiply.
template <class S, int N>
BS_INLINE Vec<S, N> multiply_add(Vec<S, N> sum, Vec<S, N> a, Vec<S, N> b) {
  return sum + a * b;
}

// The conversions of bf16 and f16, in lanes of 16 and 32 bits.
template <int N>
BS_INLINE Vec<uint32_t, N> widen(Vec<uint16_t, N> half) {
  return __builtin_convertvector(half, Vec<uint32_t, N>);
}

template <int N>
BS_INLINE Vec<float, N> float_of_f16(Vec<uint16_t, N> half) {
  using U = Vec<uint32_t, N>;
  const U h = widen<N>(half);
  // Moves the fields to where f32 has them, then corrects the exponent by 2^(127 - 15). That is right for subnormals,
  // too.
  const U magnitude = bits_as<U>(bits_as<Vec<float, N>>((h & 0x7fff) << 13) * 0x1p112f);
  const U special = (h & 0x7c00) == 0x7c00 ? U{} + 0x7f800000u : U{};
  return bits_as<Vec<float, N>>(magnitude | special | (h & 0x8000) << 16);
}

template <int N>
BS_INLINE Vec<uint16_t, N> f16_of_float(Vec<float, N> v) {
  using U = Vec<uint32_t, N>;
  const U bits = bits_as<U>(v);
  const U sign = (bits >> 16) & 0x8000;
  const U magnitude = bits & 0x7fffffff;
  // The last bit of an f32 in [0.5, 1) is 2^-24, the unit of f16's subnormals: adding 0.5 rounds to it.
  const U aligner = U{} + (126u << 23);
  const U subnormal = bits_as<U>(bits_as<Vec<float, N>>(magnitude) + bits_as<Vec<float, N>>(aligner)) - aligner;
  const U normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const U special = magnitude > 0x7f800000 ? U{} + 0x7e00u : U{} + 0x7c00u;
  U result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= (143u << 23) ? special : result;
  return __builtin_convertvector(result | sign, Vec<uint16_t, N>);
}

template <int N>
BS_INLINE Vec<uint16_t, N> bf16_of_float(Vec<float, N> v) {
  using U = Vec<uint32_t, N>;
  const U bits = bits_as<U>(v);
  const U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  const U quiet_nan = (bits >> 16) | 0x40;
  const U result = (bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded;
  return __builtin_convertvector(result, Vec<uint16_t, N>);
}

#if defined(__AVX512F__)
// One instruction. GCC 12 would widen halves and join them. (It calls the unmasked intrinsic uninitialized.)
template <>
BS_INLINE Vec<uint32_t, 16> widen<16>(Vec<uint16_t, 16> half) {
  return bits_as<Vec<uint32_t, 16>>(_mm512_maskz_cvtepu16_epi32(0xffff, bits_as<__m256i>(half)));
}
#endif

#if defined(__aarch64__)
// One instruction each. GCC 12 would take vectors of 8 bytes apart lane by lane to widen them.
template <>
BS_INLINE Vec<uint32_t, 4> widen<4>(Vec<uint16_t, 4> half) {
  return bits_as<Vec<uint32_t, 4>>(vmovl_u16(bits_as<uint16x4_t>(half)));
}
template <>
BS_INLINE Vec<float, 4> float_of_f16<4>(Vec<uint16_t, 4> half) {
  return bits_as<Vec<float, 4>>(vcvt_f32_f16(bits_as<float16x4_t>(half)));
}
template <>
BS_INLINE Vec<uint16_t, 4> f16_of_float<4>(Vec<float, 4> v) {
  return bits_as<Vec<uint16_t, 4>>(vcvt_f16_f32(bits_as<float32x4_t>(v)));
}
#endif

// load_as<S, N>(p): N elements from any address, as S.
template <class S, int N>
BS_INLINE Vec<S, N> load_as(const S* p) {
  Vec<S, N> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

template <class S, int N>
BS_INLINE Vec<S, N> load_as(const BFloat16* p) {
  Vec<uint16_t, N> half;
  __builtin_memcpy(&half, p, sizeof(half));
  return bits_as<Vec<S, N>>(widen<N>(half) << 16);
}

template <class S, int N>
BS_INLINE Vec<S, N> load_as(const Float16* p) {
  Vec<uint16_t, N> half;
  __builtin_memcpy(&half, p, sizeof(half));
  return float_of_f16<N>(half);
}

template <class S, int N>
BS_INLINE void store_as(S* p, Vec<S, N> v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

template <class S, int N>
BS_INLINE void store_as(BFloat16* p, Vec<S, N> v) {
  const Vec<uint16_t, N> half = bf16_of_float<N>(v);
  __builtin_memcpy(p, &half, sizeof(half));
}

template <class S, int N>
BS_INLINE void store_as(Float16* p, Vec<S, N> v) {
  const Vec<uint16_t, N> half = f16_of_float<N>(v);
  __builtin_memcpy(p, &half, sizeof(half));
}

// The first `count` lanes. The others are 0 (load) or not written (store).
template <class S, int N, class T>
BS_INLINE Vec<S, N> load_first(const T* p, int64_t count) {
  if (count >= N) return load_as<S, N>(p);
  T buffer[N] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = p[i];
  return load_as<S, N>(static_cast<const T*>(buffer));
}

template <class S, int N, class T>
BS_INLINE void store_first(T* p, Vec<S, N> v, int64_t count) {
  if (count >= N) {
    store_as<S, N>(p, v);
    return;
  }
  T buffer[N];
  store_as<S, N>(static_cast<T*>(buffer), v);
  for (int64_t i = 0; i < count; ++i) p[i] = buffer[i];
}

// Transposes N rows of N lanes. In each of log2 N steps, rows `Distance` apart exchange their off-diagonal squares.
template <int Distance, class S, int N, int... Lane>
BS_INLINE void exchange(Vec<S, N>& a, Vec<S, N>& b, std::integer_sequence<int, Lane...>) {
  const Vec<S, N> upper = __builtin_shufflevector(a, b, ((Lane & Distance) == 0 ? Lane : N + Lane - Distance)...);
  b = __builtin_shufflevector(a, b, ((Lane & Distance) == 0 ? Lane + Distance : N + Lane)...);
  a = upper;
}

template <class S, int N, int Distance = N / 2>
BS_INLINE void transpose(Vec<S, N> (&rows)[N]) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    if ((i & Distance) == 0) {
      exchange<Distance, S, N>(rows[i], rows[i + Distance], std::make_integer_sequence<int, N>());
    }
  }
  if constexpr (Distance > 1) transpose<S, N, Distance / 2>(rows);
}

#if defined(__AVX512F__)
// Every second run of `Run` lanes of a and of b: of each quarter (unpack) or of the whole (shuffle of quarters).
template <int Run, bool kOdd, class V, int... Lane>
BS_INLINE V unpacked(V a, V b, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(a, b,
                                 (Lane / 4 * 4 + (kOdd ? 2 : 0) + Lane % 4 / (2 * Run) * Run + Lane % Run +
                                  (Lane % (2 * Run) >= Run ? 16 : 0))...);
}
template <bool kOdd, class V, int... Lane>
BS_INLINE V quarters(V a, V b, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(a, b, (Lane / 8 * 16 + Lane % 8 / 4 * 8 + (kOdd ? 4 : 0) + Lane % 4)...);
}

// 16 x 16 by unpacks and shuffles of quarters. They need no table of lanes and run at twice the rate of the permutes
// above: Zen 5, a square in L1, 9.0 ns -> 4.6.
template <class S>
BS_INLINE void transpose_16(Vec<S, 16> (&rows)[16]) {
  constexpr auto kLanes16 = std::make_integer_sequence<int, 16>();
  Vec<S, 16> pairs[16], fours[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = unpacked<1, false>(rows[i], rows[i + 1], kLanes16);
    pairs[i + 1] = unpacked<1, true>(rows[i], rows[i + 1], kLanes16);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    fours[i] = unpacked<2, false>(pairs[i], pairs[i + 2], kLanes16);
    fours[i + 1] = unpacked<2, true>(pairs[i], pairs[i + 2], kLanes16);
    fours[i + 2] = unpacked<2, false>(pairs[i + 1], pairs[i + 3], kLanes16);
    fours[i + 3] = unpacked<2, true>(pairs[i + 1], pairs[i + 3], kLanes16);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const auto even = quarters<false>(fours[c], fours[c + 4], kLanes16);
    const auto odd = quarters<true>(fours[c], fours[c + 4], kLanes16);
    const auto even_too = quarters<false>(fours[c + 8], fours[c + 12], kLanes16);
    const auto odd_too = quarters<true>(fours[c + 8], fours[c + 12], kLanes16);
    rows[c] = quarters<false>(even, even_too, kLanes16);
    rows[c + 4] = quarters<false>(odd, odd_too, kLanes16);
    rows[c + 8] = quarters<true>(even, even_too, kLanes16);
    rows[c + 12] = quarters<true>(odd, odd_too, kLanes16);
  }
}
template <>
BS_INLINE void transpose<float, 16, 8>(Vec<float, 16> (&rows)[16]) {
  transpose_16<float>(rows);
}
template <>
BS_INLINE void transpose<uint32_t, 16, 8>(Vec<uint32_t, 16> (&rows)[16]) {
  transpose_16<uint32_t>(rows);
}
#endif

}  // namespace
}  // namespace blocksparse
