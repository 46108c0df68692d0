// Element types in device code. The 16-bit ones are types of our own, of which only two functions each are needed.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/convert.h"

namespace blocksparse {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// The type in which products of T are summed.
template <class T>
using SumOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ inline float widen(Bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
__device__ inline float widen(F16 x) { return ptx::cvt_f32_f16(x.bits); }
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }

template <class T>
__device__ inline T narrow(SumOf<T> x) {
  if constexpr (std::is_same_v<T, Bf16>) return {ptx::cvt_bf16_f32(x)};
  else if constexpr (std::is_same_v<T, F16>) return {ptx::cvt_f16_f32(x)};
  else return x;
}

// Rounds to the 11 bits that tensor cores read of tf32; they cut off the rest. One instruction, where cvt.rna.tf32
// takes two. Numbers of 11 bits, NaN and Inf stay as they are. Others are off by .7 ulp at most, and by .31 on average
// (to nearest: .29), without bias.
__device__ inline uint32_t rounded_to_tf32(float x) { return __float_as_uint(x * (1 + 0.7f * 0x1p-11f)); }

// Two numbers in one word, the first in the low half.
__device__ inline uint32_t narrow_pair(float low, float high, Bf16) { return ptx::cvt_bf16x2_f32(low, high); }
__device__ inline uint32_t narrow_pair(float low, float high, F16) { return ptx::cvt_f16x2_f32(low, high); }

}  // namespace blocksparse
