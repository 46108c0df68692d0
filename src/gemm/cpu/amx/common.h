// What the AMX kernels share: tiles by number, and the place of x.
#pragma once

#include <utility>

#include "core/ceil_div.h"
#include "gemm/cpu/product.h"

namespace blocksparse::gemm {
namespace {

constexpr int kTileRows = 16, kTileDepth = 32;  // inputs: 16 pairs

// Calls f.operator()<0>(), f.operator()<1>(), ...: tiles have constant numbers.
template <int... I, class F>
BS_INLINE void for_tiles(std::integer_sequence<int, I...>, F f) {
  (f.template operator()<I>(), ...);
}
template <int N, class F>
BS_INLINE void for_tiles(F f) {
  for_tiles(std::make_integer_sequence<int, N>(), f);
}

inline int64_t panel_features(const ProductArgs& a) { return round_up(a.inputs, a.block); }

// The panel of a vector of 16 tokens.
inline BFloat16* panel_of(const ProductArgs& a, int64_t vector) {
  return static_cast<BFloat16*>(a.panels) + vector % a.panel_vectors * kTileRows * panel_features(a);
}

}  // namespace
}  // namespace blocksparse::gemm
