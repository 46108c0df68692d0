// Quotients and multiples rounded up, on the host and on a card.
#pragma once

#include <concepts>

namespace blocksparse {

// The number of steps that cover `value` >= 0. The type of the result is that of value + step.
template <std::integral Value, std::integral Step>
constexpr auto ceil_div(Value value, Step step) {
  return (value + step - 1) / step;
}

// The least multiple of `step` that is >= value >= 0.
template <std::integral Value, std::integral Step>
constexpr auto round_up(Value value, Step step) {
  return ceil_div(value, step) * step;
}

}  // namespace blocksparse
