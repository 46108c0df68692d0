// The first step of product.h: packs one vector of tokens of x into a panel.
#pragma once

#include "core/ceil_div.h"
#include "cpu/pack.h"
#include "gemm/cpu/kernels.h"

namespace blocksparse::gemm {
namespace {

// Where a vector of packed x begins, and the distance between its inputs.
struct PanelPlace {
  int64_t at, input;
};

// The number of `left` vectors of a group that make its next tile. A single vector next to a full tile would leave the
// FMA units idle between dependent sums, so four vectors are two tiles of two.
template <class C>
constexpr BS_INLINE int vectors_of_tile(int64_t left) {
  if (C::tile.vectors >= 3 && left >= 3 && left != 4) return 3;
  return left >= 2 ? 2 : 1;
}

// Whether the vectors of a tile lie side by side, input by input: a tile then reads one stream.
template <class C>
constexpr bool kSideBySide = kVectorBytes == 32 && kTogether<typename C::P> == 1;

// The packed vectors that are multiplied together.
struct PackedGroup {
  int64_t first, last;
};

template <class C>
PackedGroup group_of(const ProductArgs& a, int64_t packed) {
  constexpr int64_t L = C::lanes;
  const int64_t group = least<int64_t>(C::group, a.group_vectors), first = packed / group * group;
  return {first, least(first + group, ceil_div(a.n, L) - (a.direct ? a.n / L : 0))};
}

template <class C>
PanelPlace panel_place(const ProductArgs& a, const PackedGroup& group, int64_t packed) {
  constexpr int64_t L = C::lanes, T = kTogether<typename C::P>;
  const int64_t inputs = ceil_div(a.inputs, T);
  if constexpr (!kSideBySide<C>) return {packed % a.panel_vectors * inputs * L, L};
  int64_t tile = group.first, vectors = vectors_of_tile<C>(group.last - tile);
  for (; packed >= tile + vectors; vectors = vectors_of_tile<C>(group.last - tile)) tile += vectors;
  return {(tile - group.first + group.first % a.panel_vectors) * inputs * L + (packed - tile) * L, vectors * L};
}

// Packs pairs of features. The rest beside whole squares is packed one by one.
template <class C>
void pack_pairs(const ProductArgs& a, int64_t vector, int64_t first_feature, int64_t last_feature) {
  constexpr int L = C::lanes;
  const int64_t token = vector * L, tokens = least<int64_t>(L, a.n - token), features = last_feature - first_feature;
  const auto* x = static_cast<const BFloat16*>(a.x) + token * a.x_token + first_feature * a.x_feature;
  auto* panel =
      static_cast<BFloat16Pair*>(a.panels) + (vector % a.panel_vectors * ceil_div(a.inputs, 2) + first_feature / 2) * L;
  int64_t f = 0;
  if (a.x_feature == 1) {
    for (; f + 2 * L <= features; f += 2 * L) {
      auto row = [&](int r) __attribute__((always_inline)) {
        return r < tokens ? load_pairs<L>(x + r * a.x_token + f) : Vec<uint32_t, L>{};
      };
      transpose_pairs<L>(row, panel + f / 2 * L, L);
    }
  } else if (tokens == L) {
    for (; f + 2 <= features; f += 2) {
      store_pairs<L>(panel + f / 2 * L, pair_rows<L>(x + f * a.x_feature, x + (f + 1) * a.x_feature));
    }
  }
  for (; f < features; f += 2) {
    for (int64_t t = 0; t < L; ++t) {
      auto at = [&](int64_t feature) {
        return t < tokens && feature < features ? x[t * a.x_token + feature * a.x_feature].bits : uint16_t{0};
      };
      panel[f / 2 * L + t] = {at(f), at(f + 1)};
    }
  }
}

// Packs features, widened to the type of sums. Vectors that are read in place have no panel.
template <class C>
void pack(const ProductArgs& a, int64_t vector, int64_t first_feature, int64_t last_feature) {
  using S = typename C::S;
  constexpr int L = C::lanes;
  const int64_t complete = a.direct ? a.n / L : 0;
  const int64_t token = vector * L, tokens = least<int64_t>(L, a.n - token), features = last_feature - first_feature;
  const auto* x = static_cast<const typename C::T*>(a.x) + token * a.x_token + first_feature * a.x_feature;
  const PanelPlace place = panel_place<C>(a, group_of<C>(a, vector - complete), vector - complete);
  S* panel = static_cast<S*>(a.panels) + place.at + first_feature * place.input;
  if (a.x_feature == 1) {
    pack_transposed<S, L>(x, a.x_token, tokens, features, panel, place.input);
  } else if (tokens == L) {
    for (int64_t f = 0; f < features; ++f) {
      store_as<S, L>(panel + f * place.input, load_as<S, L>(x + f * a.x_feature));
    }
  } else {
    for (int64_t f = 0; f < features; ++f) pack_run<S, L>(x + f * a.x_feature, tokens, L, panel + f * place.input);
  }
}

}  // namespace
}  // namespace blocksparse::gemm
