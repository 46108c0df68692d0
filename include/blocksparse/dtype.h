// Element types. Sums are always f32, or f64 for f64.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace blocksparse {

enum class DType : int32_t { f32 = 0, f64 = 1, bf16 = 2, f16 = 3 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return 8;
    case DType::f32: return 4;
    case DType::bf16:
    case DType::f16: return 2;
  }
  return 0;
}

// The type in which products of `dtype` are summed, and in which its gates are given.
constexpr DType sum_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::f64: return "f64";
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
  }
  return "unknown";
}

constexpr std::optional<DType> parse_dtype(std::string_view name) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    if (name == name_of(dtype)) return dtype;
  }
  return std::nullopt;
}

}  // namespace blocksparse
