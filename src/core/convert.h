// Single elements of any type as double, for references, tests and checks. Clarity matters here; of speed as much as
// lets tests load each element anew.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "blocksparse/dtype.h"

namespace blocksparse {

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float f16_to_float(uint16_t bits) {
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  const uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * static_cast<float>(fraction) * 0x1p-24f;
  return sign * std::bit_cast<float>((exponent + 127 - 15) << 23 | fraction << 13);
}

inline uint16_t float_to_f16(float value) {
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  const int exponent = std::max(magnitude == 0 ? -14 : std::ilogb(magnitude), -14);
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));  // ties to even
  return static_cast<uint16_t>(sign | (units < 1024 ? units : ((exponent + 14) * 1024 + units)));
}

inline double load_element(const void* data, int64_t i, DType dtype) {
  switch (dtype) {
    case DType::f64: return static_cast<const double*>(data)[i];
    case DType::f32: return static_cast<const float*>(data)[i];
    case DType::bf16: return bf16_to_float(static_cast<const uint16_t*>(data)[i]);
    case DType::f16: return f16_to_float(static_cast<const uint16_t*>(data)[i]);
  }
  return 0;
}

inline void store_element(void* data, int64_t i, DType dtype, double value) {
  switch (dtype) {
    case DType::f64: static_cast<double*>(data)[i] = value; break;
    case DType::f32: static_cast<float*>(data)[i] = static_cast<float>(value); break;
    case DType::bf16: static_cast<uint16_t*>(data)[i] = float_to_bf16(static_cast<float>(value)); break;
    case DType::f16: static_cast<uint16_t*>(data)[i] = float_to_f16(static_cast<float>(value)); break;
  }
}

}  // namespace blocksparse
