// What a product kernel is compiled for, and its last step: y = f(sums + bias + residual), narrowed.
#pragma once

#include "cpu/activation.h"
#include "cpu/pack.h"
#include "ops/linear/kernels.h"

namespace blocksparse::linear {
namespace {

constexpr int kMaxBlock = 128;
constexpr int kGroupBytes = 256;  // tokens of a group in the type of sums: 64 f32, 32 f64

template <DType D, Tile kTile>
struct ProductConfig {
  static constexpr DType dtype = D;
  using T = Element<D>;
  using S = Sum<D>;
  static constexpr Tile tile = kTile;
  static constexpr int lanes = kLanes<S>;
  static constexpr int group = kGroupBytes / sizeof(S) / lanes;  // vectors
  static constexpr bool narrow = sizeof(T) < sizeof(S);
};

// A run of outputs that lie side by side in y: of one feature (bias is one value) or of one token (bias is a run too).
template <class C>
BS_INLINE void finish_run(const ProductArgs& a, const typename C::S* sums, int64_t count, const typename C::T* bias,
                          bool bias_is_run, const typename C::T* residual, typename C::T* y) {
  using S = typename C::S;
  constexpr int L = C::lanes;
  Vec<S, L> one_bias{};
  if (bias != nullptr && !bias_is_run) one_bias = one_bias + load_first<S, L>(bias, 1)[0];
  for (int64_t i = 0; i < count; i += L) {
    const int64_t m = least<int64_t>(L, count - i);
    Vec<S, L> z = load_first<S, L>(sums + i, m);
    if (bias != nullptr) z += bias_is_run ? load_first<S, L>(bias + i, m) : one_bias;
    if (residual != nullptr) z += load_first<S, L>(residual + i, m);
    store_first<S, L>(y + i, activate<S, L>(a.activation, z), m);
  }
}

// The place of a block of outputs of one token in y, residual and bias.
template <class C>
struct Place {
  typename C::T* y;
  const typename C::T* residual;  // null: none
  const typename C::T* bias;      // null: none
  int64_t features;               // that exist

  Place(const ProductArgs& a, int64_t to, int64_t token) {
    const int64_t feature = to * a.block;
    features = least<int64_t>(a.block, a.outputs - feature);
    y = static_cast<typename C::T*>(a.y) + token * a.y_token + feature * a.y_feature;
    residual = static_cast<const typename C::T*>(a.residual);
    if (residual != nullptr) residual += token * a.residual_token + feature * a.residual_feature;
    bias = static_cast<const typename C::T*>(a.bias);
    if (bias != nullptr) bias += feature;
  }
};

// Writes sums [tokens][b] to y.
template <class C>
void finish_tokens(const ProductArgs& a, int64_t to, int64_t token, int64_t tokens, const typename C::S* sums) {
  for (int64_t t = 0; t < tokens; ++t) {
    const Place<C> p(a, to, token + t);
    const auto* s = sums + t * a.block;
    if (a.y_feature == 1 && (p.residual == nullptr || a.residual_feature == 1)) {
      finish_run<C>(a, s, p.features, p.bias, true, p.residual, p.y);
      continue;
    }
    for (int64_t f = 0; f < p.features; ++f) {  // features-first, or y and residual of different orders: one by one
      finish_run<C>(a, s + f, 1, p.bias == nullptr ? nullptr : p.bias + f, false,
                    p.residual == nullptr ? nullptr : p.residual + f * a.residual_feature, p.y + f * a.y_feature);
    }
  }
}

// Writes sums [b][lanes] of one vector of tokens to y.
template <class C>
void finish(const ProductArgs& a, int64_t to, int64_t vector, const typename C::S* sums) {
  using S = typename C::S;
  constexpr int L = C::lanes;
  const int64_t token = vector * L, tokens = least<int64_t>(L, a.n - token);
  if (a.y_token == 1 && (a.residual == nullptr || a.residual_token == 1)) {
    const Place<C> p(a, to, token);
    for (int64_t f = 0; f < p.features; ++f) {
      finish_run<C>(a, sums + f * L, tokens, p.bias == nullptr ? nullptr : p.bias + f, false,
                    p.residual == nullptr ? nullptr : p.residual + f * a.residual_feature, p.y + f * a.y_feature);
    }
    return;
  }
  alignas(64) S rows[L * kMaxBlock];  // [lanes][b]
  for (int64_t f = 0; f < a.block; f += L) {
    pack_transposed<S, L>(sums + f * L, L, least<int64_t>(L, a.block - f), L, rows + f, a.block);
  }
  finish_tokens<C>(a, to, token, tokens, rows);
}

}  // namespace
}  // namespace blocksparse::linear
