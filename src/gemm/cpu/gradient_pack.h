// What a gradient kernel is compiled for, and its first step: packs blocks of features of x or dy into panels, widened
// to the type of sums. Convolutions pack their images by it as well.
#pragma once

#include "core/ceil_div.h"
#include "cpu/pack.h"
#include "gemm/cpu/kernels.h"

namespace blocksparse::gemm {
namespace {

template <DType D, Tile kTile, class Panel = Sum<D>>
struct GradientConfig {
  static constexpr DType dtype = D;
  using T = Element<D>;
  using S = Sum<D>;
  using P = Panel;
  static constexpr Tile tile = kTile;
  static constexpr int lanes = kLanes<S>;
  static constexpr bool narrow = sizeof(T) < sizeof(S);
};

inline bool is_read(const RowsToPack& p, int64_t block) {
  return p.starts == nullptr || p.starts[block] != p.starts[block + 1];
}

// Packs features-last rows, a few tokens of every block in turn. Rows of x are often a power of two apart, so whole
// columns would fight for one set of L1: 64 tokens of width 1024, a block at a time, take twice as long.
//
// The next tokens are asked for, because the hardware follows rows only to the end of a page. Xeon, wgrad of 512
// tokens, 4096 features: 15.2 ms -> 14.6.
template <class C>
void pack_rows(const RowsToPack& p, int64_t first_block, int64_t last_block) {
  using S = typename C::S;
  constexpr int kRun = C::lanes < 8 ? C::lanes : 8;  // divides every block size
  constexpr int64_t kTokens = 4, kLine = 64 / static_cast<int64_t>(sizeof(typename C::T));
  for (int64_t first = 0; first < p.tokens; first += kTokens) {
    const int64_t last = least(first + kTokens, p.tokens);
    for (int64_t block = first_block; block < last_block; ++block) {
      if (!is_read(p, block)) continue;
      const int64_t features = least<int64_t>(p.block, p.features - block * p.block);
      const auto* from = static_cast<const typename C::T*>(p.source) + block * p.block;
      S* panel = static_cast<S*>(p.panels) + (block * p.round + p.first_token) * p.block;
      for (int64_t t = first; t < last; ++t) {
        const auto* later = from + (t + kTokens) * p.token_stride;
        for (int64_t f = 0; f < p.block; f += kLine) __builtin_prefetch(later + f);
        pack_run<S, kRun>(from + t * p.token_stride, features, p.block, panel + t * p.block);
      }
    }
  }
}

// Packs features-first x or dy in squares.
template <class C, int kSquare>
void pack_columns_by(const RowsToPack& p, int64_t block) {
  using S = typename C::S;
  const int64_t feature = block * p.block, features = least<int64_t>(p.block, p.features - feature);
  const auto* from = static_cast<const typename C::T*>(p.source) + feature * p.feature_stride;
  S* panel = static_cast<S*>(p.panels) + (block * p.round + p.first_token) * p.block;
  for (int64_t f = 0; f < p.block; f += kSquare) {
    const int64_t rows = least<int64_t>(kSquare, features - f);
    pack_transposed<S, kSquare>(from + f * p.feature_stride, p.feature_stride, rows, p.tokens, panel + f, p.block);
  }
}

template <class C>
void pack_columns(const RowsToPack& p, int64_t block) {
  constexpr int kSquare = C::lanes < 8 ? C::lanes : 8;
  if (p.block >= C::lanes) pack_columns_by<C, C::lanes>(p, block);
  else pack_columns_by<C, kSquare>(p, block);
}

// Writes a row of a panel of pairs: both tokens, the first and zeros, or (first null) the second beside what is there.
template <int Q>
BS_INLINE void put_pair_row(const BFloat16* first, const BFloat16* second, int64_t features, int64_t block,
                            BFloat16Pair* to) {
  if (first != nullptr && second != nullptr && features == block) {
    for (int64_t f = 0; f < block; f += Q) store_pairs<Q>(to + f, pair_rows<Q>(first + f, second + f));
    return;
  }
  for (int64_t f = 0; f < block; ++f) {
    const bool exists = f < features;
    if (first != nullptr) to[f].first = exists ? first[f].bits : uint16_t{0};
    to[f].second = exists && second != nullptr ? second[f].bits : uint16_t{0};
  }
}

// Packs features in the caller's order, or activations of which neither features nor tokens lie side by side.
template <class C>
void pack_in_order(const RowsToPack& p, int64_t block) {
  using S = typename C::S;
  const int64_t feature = block * p.block, features = least<int64_t>(p.block, p.features - feature);
  const auto* from = static_cast<const typename C::T*>(p.source);
  S* panel = static_cast<S*>(p.panels) + (block * p.round + p.first_token) * p.block;
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t f = 0; f < p.block; ++f) {
      S& to = panel[t * p.block + f];
      const int64_t source = p.order == nullptr || f >= features ? feature + f : p.order[feature + f];
      to = f < features ? load_as<S, 1>(from + t * p.token_stride + source * p.feature_stride)[0] : S{};
    }
  }
}

// Packs pairs of features-last rows, a few tokens of every block in turn as pack_rows does.
inline void pack_pair_rows(const RowsToPack& p, int64_t first_block, int64_t last_block) {
  constexpr int64_t kTokens = 4;
  const int64_t end = p.first_token + p.tokens;
  for (int64_t first = p.first_token; first < end;) {
    const int64_t last = least(first / kTokens * kTokens + kTokens, end);
    for (int64_t block = first_block; block < last_block; ++block) {
      if (!is_read(p, block)) continue;
      const int64_t features = least<int64_t>(p.block, p.features - block * p.block);
      const auto* from = static_cast<const BFloat16*>(p.source) + block * p.block;
      auto* panel = static_cast<BFloat16Pair*>(p.panels) + block * p.round * p.block;
      auto row = [&](int64_t t) {
        return t < p.first_token || t >= end ? nullptr : from + (t - p.first_token) * p.token_stride;
      };
      for (int64_t t = first / 2 * 2; t < last; t += 2) {
        BFloat16Pair* to = panel + t / 2 * p.block;
        if (p.block >= 16) put_pair_row<16>(row(t), row(t + 1), features, p.block, to);
        else put_pair_row<8>(row(t), row(t + 1), features, p.block, to);
      }
    }
    first = last;
  }
}

// Packs pairs of features-first columns. The rest beside whole squares is packed one by one.
inline void pack_pair_columns(const RowsToPack& p, int64_t block) {
  constexpr int Q = kLanes<uint32_t> < 8 ? kLanes<uint32_t> : 8;  // features, and pairs of tokens
  const int64_t features = least<int64_t>(p.block, p.features - block * p.block);
  const auto* from = static_cast<const BFloat16*>(p.source) + block * p.block * p.feature_stride;
  auto* panel = static_cast<BFloat16Pair*>(p.panels) + block * p.round * p.block;
  const int64_t whole_features = features / Q * Q;
  const int64_t whole_tokens = p.first_token % 2 == 0 ? p.tokens / (2 * Q) * (2 * Q) : 0;
  for (int64_t f = 0; f < whole_features; f += Q) {
    for (int64_t t = 0; t < whole_tokens; t += 2 * Q) {
      transpose_pairs<Q>([&](int r) { return load_pairs<Q>(from + (f + r) * p.feature_stride + t); },
                         panel + (p.first_token + t) / 2 * p.block + f, p.block);
    }
  }
  for (int64_t f = 0; f < p.block; ++f) {
    for (int64_t t = f < whole_features ? whole_tokens : 0; t < p.tokens; ++t) {
      BFloat16Pair& pair = panel[(p.first_token + t) / 2 * p.block + f];
      const uint16_t bits = f < features ? from[f * p.feature_stride + t].bits : uint16_t{0};
      if ((p.first_token + t) % 2 == 0) pair = {bits, 0};
      else pair.second = bits;
    }
  }
}

constexpr int64_t kPairsAtOnce = 16;  // pairs that a tile holds

inline void pack_pairs_for_gradient(const RowsToPack& p, int64_t first_block, int64_t last_block) {
  if (p.feature_stride == 1) pack_pair_rows(p, first_block, last_block);
  for (int64_t block = first_block; block < last_block; ++block) {
    if (p.feature_stride != 1 && is_read(p, block)) pack_pair_columns(p, block);
    if (!p.last) continue;
    const int64_t pairs = ceil_div(p.first_token + p.tokens, 2), extra = -pairs & (kPairsAtOnce - 1);
    auto* rest = static_cast<BFloat16Pair*>(p.panels) + (block * p.round + pairs) * p.block;
    __builtin_memset(rest, 0, sizeof(BFloat16Pair) * static_cast<size_t>(extra * p.block));
  }
}

template <class C>
void pack_for_gradient(const RowsToPack& p, int64_t first_block, int64_t last_block) {
  if constexpr (kTogether<typename C::P> == 2) {
    pack_pairs_for_gradient(p, first_block, last_block);
  } else if (p.order != nullptr || (p.feature_stride != 1 && p.token_stride != 1)) {
    for (int64_t block = first_block; block < last_block; ++block) pack_in_order<C>(p, block);
  } else if (p.feature_stride == 1) {
    pack_rows<C>(p, first_block, last_block);
  } else {
    for (int64_t block = first_block; block < last_block; ++block) {
      if (is_read(p, block)) pack_columns<C>(p, block);
    }
  }
}

}  // namespace
}  // namespace blocksparse::gemm
