// Building messages: concat("[linear] x has ", rank, " dimensions").
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "blocksparse/status.h"

namespace blocksparse {

namespace text_detail {
inline std::string piece(std::string_view text) { return std::string(text); }
std::string piece(double value);
template <class T>
  requires std::is_integral_v<T>
std::string piece(T value) {
  return std::to_string(value);
}
}  // namespace text_detail

template <class... Args>
std::string concat(const Args&... args) {
  std::string text;
  (text.append(text_detail::piece(args)), ...);
  return text;
}

// An invalid_argument made of its parts.
template <class... Args>
Status invalid(const Args&... args) {
  return {StatusCode::invalid_argument, concat(args...)};
}

}  // namespace blocksparse

// Returns from the function with the status if it is not ok.
#define BS_RETURN_IF_ERROR(expression)                                                     \
  do {                                                                                     \
    if (::blocksparse::Status bs_status = (expression); !bs_status.ok()) return bs_status; \
  } while (false)
