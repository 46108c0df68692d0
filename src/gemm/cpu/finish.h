// What a product kernel is compiled for, and its last step: y = f(sums + bias + residual), narrowed.
#pragma once

#include "core/ceil_div.h"
#include "cpu/activation.h"
#include "cpu/pack.h"
#include "gemm/cpu/kernels.h"

namespace blocksparse::gemm {
namespace {

constexpr int kSmallestBlock = 8;  // a vector of 16 f32 does not fit into it
constexpr int kGroupBytes = 256;   // tokens of a group in the type of sums: 64 f32, 32 f64

// Whether sums of a tile start from 0 and earlier sums are added at the end. Where sums take all registers, and with
// bfdot, GCC 12 otherwise moves every sum through the stack before and after the loop.
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kAddsLast = true;
#else
constexpr bool kAddsLast = kVectorBytes == 32;
#endif

template <DType D, Tile kTile, class Panel = Sum<D>>
struct ProductConfig {
  static constexpr DType dtype = D;
  using T = Element<D>;
  using S = Sum<D>;
  using P = Panel;
  static constexpr Tile tile = kTile;
  static constexpr int lanes = kLanes<S>;
  static constexpr int group = kGroupBytes / sizeof(S) / lanes;  // vectors
  // Rows of x in a chunk, for blocks of up to 32; a larger block is a chunk of its own. With AVX2, 128 rows are 12 KB
  // of a tile's panel. 128 rows are 2 to 5 % faster than 64 (b = 8: 96) on Zen 3, packed, and on Zen 5. 192 and 256
  // bring no more.
  static constexpr int chunk_inputs = kVectorBytes >= 32 ? 128 : 64, chunk_inputs_of_8 = chunk_inputs;
  // Fewer rows with AVX2 in two cases. If x is read in place with rows more than two lines apart, a tile's lines fall
  // into half the sets of 32 KB: 128 rows are 2 to 5 % slower. For half a group of tokens, the first tile would ask for
  // W of a chunk while it makes few products: up to 10 % slower from memory.
  static constexpr int few_chunk_inputs = 64, few_chunk_inputs_of_8 = 96;
  static constexpr int most_shared = 32;
  static constexpr bool by_token = false;  // true: sums are [lanes][b]; false: [b][lanes]
  static constexpr bool narrow = sizeof(T) < sizeof(S);
};

// Where the sums of a slice are.
template <class C>
typename C::S* partial_of(const ProductArgs& a, int64_t slot, int64_t vector) {
  const int64_t vectors = ceil_div(a.n, C::lanes);
  return static_cast<typename C::S*>(a.partial) + (slot * vectors + vector) * a.block * C::lanes;
}

constexpr int kGluGroup = static_cast<int>(kInterleaved);  // features of the gate, then as many of up

// The place of one token's block of outputs in y, residual and bias.
template <class C>
struct Place {
  typename C::T* y;
  const typename C::T* residual;  // null: none
  const typename C::T* bias;      // null: none
  int64_t features;               // outputs that exist
  int64_t hidden;                 // gated linear unit: features of y from here on

  Place(const ProductArgs& a, int64_t to, int64_t token) {
    const int64_t feature = to * a.block;
    features = least<int64_t>(a.block, a.outputs - feature);
    const int64_t of_y = a.hidden > 0 ? feature / 2 : feature;
    hidden = a.hidden - of_y;
    y = static_cast<typename C::T*>(a.y) + token * a.y_token + of_y * a.y_feature;
    residual = static_cast<const typename C::T*>(a.residual);
    if (residual != nullptr) residual += token * a.residual_token + feature * a.residual_feature;
    bias = static_cast<const typename C::T*>(a.bias);
    if (bias != nullptr) bias += feature;
  }
};

template <class C>
BS_INLINE typename C::S gate_of(const ProductArgs& a, int64_t gate) {
  return a.gates != nullptr ? static_cast<const typename C::S*>(a.gates)[gate] : typename C::S{1};
}

inline bool is_plain(const ProductArgs& a) {
  return a.bias == nullptr && a.residual == nullptr && a.activation == Activation::none && a.hidden == 0;
}

// Calls body(output of the gate, feature of y, count) for runs of at most W features of y. Outputs of up are kGluGroup
// after those of the gate.
template <int W, class Body>
BS_INLINE void for_runs_of_glu(int64_t outputs, int64_t hidden, Body&& body) {
  static_assert(kGluGroup % W == 0);
  for (int64_t o = 0; o < outputs; o += 2 * kGluGroup) {
    for (int64_t i = 0; i < kGluGroup && o / 2 + i < hidden; i += W) {
      body(o + i, o / 2 + i, least<int64_t>(W, hidden - o / 2 - i));
    }
  }
}

// The sums of one token: y = f(gate) * up.
template <class C>
BS_INLINE void finish_glu(const ProductArgs& a, const Place<C>& p, const typename C::S* sums) {
  using S = typename C::S;
  constexpr int W = least(C::lanes, kGluGroup);
  for_runs_of_glu<W>(p.features, p.hidden,
                     [&](int64_t output, int64_t feature, int64_t count) __attribute__((always_inline)) {
                       Vec<S, W> gate = load_as<S, W>(sums + output), up = load_as<S, W>(sums + output + kGluGroup);
                       if (p.bias != nullptr) {
                         gate += load_as<S, W>(p.bias + output);
                         up += load_as<S, W>(p.bias + output + kGluGroup);
                       }
                       const Vec<S, W> y = activate<S, W>(a.activation, gate) * up;
                       if (a.y_feature == 1) {
                         store_first<S, W>(p.y + feature, y, count);
                         return;
                       }
                       for (int64_t i = 0; i < count; ++i)
                         store_as<S, 1>(p.y + (feature + i) * a.y_feature, Vec<S, 1>{y[i]});
                     });
}

// Sums [b][lanes] of one vector of tokens, for features-first y.
template <class C>
void finish_glu_by_feature(const ProductArgs& a, const Place<C>& p, int64_t tokens, const typename C::S* sums) {
  using S = typename C::S;
  constexpr int L = C::lanes;
  for_runs_of_glu<1>(
      p.features, p.hidden, [&](int64_t output, int64_t feature, int64_t) __attribute__((always_inline)) {
        Vec<S, L> gate = load_as<S, L>(sums + output * L), up = load_as<S, L>(sums + (output + kGluGroup) * L);
        if (p.bias != nullptr) {
          gate += broadcast<S, L>(load_as<S, 1>(p.bias + output)[0]);
          up += broadcast<S, L>(load_as<S, 1>(p.bias + output + kGluGroup)[0]);
        }
        store_first<S, L>(p.y + feature * a.y_feature, activate<S, L>(a.activation, gate) * up, tokens);
      });
}

// The sums of one token whose features lie side by side in y.
template <class C, int L>
BS_INLINE void finish_features(const ProductArgs& a, const Place<C>& p, const typename C::S* sums) {
  using S = typename C::S;
  for (int64_t f = 0; f < p.features; f += L) {
    const int64_t count = least<int64_t>(L, p.features - f);
    Vec<S, L> z = load_as<S, L>(sums + f);
    if (p.bias != nullptr) z += load_first<S, L>(p.bias + f, count);
    if (p.residual != nullptr) z += load_first<S, L>(p.residual + f, count);
    store_first<S, L>(p.y + f, activate<S, L>(a.activation, z), count);
  }
}

// One sum.
template <class C>
BS_INLINE void finish_one(const ProductArgs& a, const Place<C>& p, int64_t feature, typename C::S sum) {
  using S = typename C::S;
  Vec<S, 1> z = {sum};
  if (p.bias != nullptr) z += load_as<S, 1>(p.bias + feature);
  if (p.residual != nullptr) z += load_as<S, 1>(p.residual + feature * a.residual_feature);
  store_as<S, 1>(p.y + feature * a.y_feature, activate<S, 1>(a.activation, z));
}

// Writes sums [tokens][b] to y. W: lanes, at most the features of a block.
template <class C, int W>
void finish_tokens_by(const ProductArgs& a, int64_t to, int64_t token, int64_t tokens, const typename C::S* sums) {
  const bool runs = a.y_feature == 1 && (a.residual == nullptr || a.residual_feature == 1);
  if (runs && is_plain(a)) {
    Place<C> p(a, to, token);
    for (int64_t t = 0; t < tokens; ++t, sums += a.block, p.y += a.y_token) {
      int64_t f = 0;
      for (; f + W <= p.features; f += W) store_as<typename C::S, W>(p.y + f, load_as<typename C::S, W>(sums + f));
      if (f < p.features) {
        store_first<typename C::S, W>(p.y + f, load_as<typename C::S, W>(sums + f), p.features - f);
      }
    }
    return;
  }
  for (int64_t t = 0; t < tokens; ++t, sums += a.block) {
    const Place<C> p(a, to, token + t);
    if (a.hidden > 0) {
      finish_glu<C>(a, p, sums);
    } else if (runs) {
      finish_features<C, W>(a, p, sums);
    } else {  // features-first, or y and residual of different orders
      for (int64_t f = 0; f < p.features; ++f) finish_one<C>(a, p, f, sums[f]);
    }
  }
}

// Writes sums [b][lanes] of one vector of tokens to features-first y.
template <class C>
void finish_by_feature(const ProductArgs& a, const Place<C>& p, int64_t tokens, const typename C::S* sums) {
  using S = typename C::S;
  constexpr int L = C::lanes;
  if (a.hidden > 0) return finish_glu_by_feature<C>(a, p, tokens, sums);
  for (int64_t f = 0; f < p.features; ++f) {
    Vec<S, L> z = load_as<S, L>(sums + f * L);
    if (p.bias != nullptr) z += broadcast<S, L>(load_as<S, 1>(p.bias + f)[0]);
    if (p.residual != nullptr) z += load_first<S, L>(p.residual + f * a.residual_feature, tokens);
    store_first<S, L>(p.y + f * a.y_feature, activate<S, L>(a.activation, z), tokens);
  }
}

// Writes sums [b][lanes] of one vector of tokens to y. Squares of W x W are transposed.
template <class C, int W>
void finish_by_token(const ProductArgs& a, int64_t to, int64_t token, int64_t tokens, const typename C::S* sums) {
  using S = typename C::S;
  constexpr int L = C::lanes;
  alignas(64) S rows[L * kMaxBlock];  // [lanes][b]
  S* out = rows;
  int64_t stride = a.block;
  const Place<C> p(a, to, token);
  bool written = false;
  if constexpr (!C::narrow) {  // nothing to add: straight into y, which saves a fifth of a product at b = 32
    written = is_plain(a) && a.y_feature == 1 && tokens == L && p.features == a.block;
    if (written) {
      out = p.y;
      stride = a.y_token;
    }
  }
  for (int64_t t = 0; t < L; t += W) {
    for (int64_t f = 0; f < a.block; f += W) {
      pack_transposed<S, W>(sums + f * L + t, L, W, W, out + t * stride + f, stride);
    }
  }
  if (!written) finish_tokens_by<C, W>(a, to, token, tokens, rows);
}

template <class C>
void finish_tokens(const ProductArgs& a, int64_t to, int64_t token, int64_t tokens, const typename C::S* sums) {
  if (C::lanes > kSmallestBlock && a.block < C::lanes) finish_tokens_by<C, kSmallestBlock>(a, to, token, tokens, sums);
  else finish_tokens_by<C, C::lanes>(a, to, token, tokens, sums);
}

// Turns sums [lanes][b] into [b][lanes].
template <class C, int W>
void exchange_sums(const ProductArgs& a, const typename C::S* sums, typename C::S* to) {
  constexpr int L = C::lanes;
  for (int64_t t = 0; t < L; t += W) {
    for (int64_t f = 0; f < a.block; f += W) {
      pack_transposed<typename C::S, W>(sums + t * a.block + f, a.block, W, W, to + f * L + t, L);
    }
  }
}

template <class C>
void finish(const ProductArgs& a, int64_t to, int64_t vector, const typename C::S* sums) {
  const int64_t token = vector * C::lanes, tokens = least<int64_t>(C::lanes, a.n - token);
  const bool by_feature = a.y_token == 1 && (a.residual == nullptr || a.residual_token == 1);
  if constexpr (C::by_token) {
    if (!by_feature) return finish_tokens<C>(a, to, token, tokens, sums);
    alignas(64) typename C::S exchanged[C::lanes * kMaxBlock];
    exchange_sums<C, kSmallestBlock>(a, sums, exchanged);
    finish_by_feature<C>(a, Place<C>(a, to, token), tokens, exchanged);
  } else if (by_feature) {
    finish_by_feature<C>(a, Place<C>(a, to, token), tokens, sums);
  } else if (C::lanes > kSmallestBlock && a.block < C::lanes) {
    finish_by_token<C, kSmallestBlock>(a, to, token, tokens, sums);
  } else {
    finish_by_token<C, C::lanes>(a, to, token, tokens, sums);
  }
}

}  // namespace
}  // namespace blocksparse::gemm
