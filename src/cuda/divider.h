// Divides 31-bit numbers by a divisor that the host knows: one multiplication and a shift.
#pragma once

#include <bit>
#include <cstdint>

#include "core/ceil_div.h"

namespace blocksparse::cuda {

struct Divider {
  uint32_t by = 1;
  uint32_t multiplier = 0, shift = 0;

  Divider() = default;
  // 1 <= divisor < 2^31. With L = ceil(log2 divisor), the multiplier ceil(2^(31 + L) / divisor) is too large by less
  // than 2^L, so quotients of numbers below 2^31 are exact.
  explicit Divider(int64_t divisor) : by(static_cast<uint32_t>(divisor)) {
    if (by == 1) return;
    const auto log2 = static_cast<uint32_t>(std::bit_width(by - 1));
    multiplier = static_cast<uint32_t>(ceil_div(uint64_t{1} << (31 + log2), by));
    shift = log2 - 1;
  }

  constexpr int quotient(int value) const {
    if (by == 1) return value;
    return static_cast<int>((uint64_t{static_cast<uint32_t>(value)} * multiplier) >> 32 >> shift);
  }
  // Returns the quotient and leaves the remainder in `value`.
  constexpr int divide(int& value) const {
    const int result = quotient(value);
    value -= result * static_cast<int>(by);
    return result;
  }
};

}  // namespace blocksparse::cuda
