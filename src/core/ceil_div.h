// Quotients and multiples rounded up, on the host and on a card.
#pragma once

#include <concepts>

namespace blocksparse {

// How many steps cover `value`, which is >= 0. In the type of value + step.
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
