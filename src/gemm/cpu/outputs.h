// fprop and dgrad of features-last x and y with vectors along outputs, for blocks of at least two vectors (on Intel's
// CPUs one). y is written in place. x is read in place, or packed as [in blocks][tokens of a group][b] where plan.cc
// (packs_tokens) says that it pays. W is transposed in fprop and paired for pairs; nothing else is rearranged.
//   x [n][inputs]   w of a chunk [blocks][inputs][b outputs]   sums [tokens][b], in registers and L1   y [n][outputs]
// With pairs an element holds two inputs, and "inputs" below counts pairs.
// Who does what
//   pack_tokens       one vector of tokens of x
//   copy_block        W of one block, transposed (fprop) or as pairs of rows (dgrad of pairs)
//   multiply_outputs  one piece (an output block and its list of blocks) for a group of tokens
//                       for each chunk of the list:                       W of a chunk stays in L1
//                         for each strip of 1, 2 or 4 vectors of outputs:
//                           for each tile of 16, 12 or 6 tokens:          sums stay in registers over the chunk
//                     The last chunk's sums go from the registers to y if there is no epilogue.
// Zen 5, 1024 x 1024, 64 tokens, b = 32, 10 %, dgrad from memory, against vectors of tokens: 79 us -> 66. NOTES.md has
// the other densities.
#pragma once

#include <type_traits>

#include "core/ceil_div.h"
#include "cpu/simd_tile.h"
#include "gemm/cpu/ahead.h"
#include "gemm/cpu/finish.h"

namespace blocksparse::gemm {
namespace {

// Whether the kernel is compiled: W is not widened, and there are enough registers for its tiles.
template <class C>
constexpr bool kAlongOutputs = kVectorBytes >= 32 && std::is_same_v<typename C::S, float> &&
                               sizeof(typename C::P) == kTogether<typename C::P> * sizeof(typename C::T);

// Whether blocks of one vector are compiled. They need a load for each product, which some CPUs do at full speed if its
// address is a constant offset from the first token's: x is packed for them. 16 registers hold too few sums.
template <class C>
constexpr bool kOneVector = kVectorBytes == 64 && kTogether<typename C::P> == 1;

// One block of W and the inputs that it meets.
template <class P>
struct OutputsEntry {
  const P* w;         // [depth][b]
  int64_t x;          // offset of the first input, in bytes
  int64_t depth;      // rows of W
  const char* later;  // a block of W that is used later
};

// What the tiles of a strip share, whatever their tokens.
template <class P>
struct OutputsStrip {
  const OutputsEntry<P>* entries;
  int count;
  int64_t row;      // elements of W from one input to the next
  int64_t asked;    // bytes of each later block that have been asked for
  int64_t x_token;  // bytes
};

// Sums of a tile: those of a token lie side by side, `token` elements from one token to the next.
template <class S>
struct TokenSums {
  S* data = nullptr;
  int64_t token = 0;
};

// The inner loop: to [T tokens][V vectors] = from + x W. from without data: 0.
//   kAsk  with each input, asks for a line of W that is used later. A flag, because all tiles of a strip together could
//         ask for more than they use.
template <class S, class P, int L, int V, int T, bool kAsk>
__attribute__((noinline)) void multiply_tokens(const OutputsStrip<P>& strip, const char* x,
                                               const TokenSums<const S>& from, const TokenSums<S>& to) {
  constexpr bool kPacked = V == 1;                      // blocks of one vector, x packed
  constexpr int kBases = kPacked ? 1 : ceil_div(T, 4);  // a base address for every fourth token
  const int64_t x_token = strip.x_token, row = kPacked ? L : strip.row;
  const TokenSums<const S> before = from;
  const TokenSums<S> after = to;
  Vec<S, L> sum[T][V];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      sum[t][v] =
          kAddsLast || before.data == nullptr ? Vec<S, L>{} : load_as<S, L>(before.data + t * before.token + v * L);
    }
  }
  for (int i = 0; i < strip.count; ++i) {
    const OutputsEntry<P>& entry = strip.entries[i];
    const P* w = entry.w;
    const char* later = entry.later + strip.asked;
    const char* rows[kBases];
#pragma GCC unroll 16
    for (int r = 0; r < kBases; ++r) rows[r] = x + entry.x + 4 * r * x_token;
    const auto step = [&](int u) __attribute__((always_inline)) {
      if constexpr (kAsk) {
        __builtin_prefetch(later);
        later += kLine;
      }
      Vec<P, L> wv[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) wv[v] = in_register(operand<P, L>(w + u * row + v * L));
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
        if constexpr (kPacked) {
          const char* at = rows[0] + t * L * static_cast<int>(sizeof(P)) + u * static_cast<int>(sizeof(P));
          add_product<S, L>(sum[t][0], operand_in_all_lanes<P, L>(at), wv[0]);
        } else {
          const Vec<P, L> xv = in_register(operand_in_all_lanes<P, L>(rows[t / 4] + t % 4 * x_token));
#pragma GCC unroll 16
          for (int v = 0; v < V; ++v) add_product<S, L>(sum[t][v], xv, wv[v]);
        }
      }
    };
    const auto advance = [&](int steps) __attribute__((always_inline)) {
      w = next_row(w + steps * row);
#pragma GCC unroll 16
      for (int r = 0; r < kBases; ++r) rows[r] = next_row(rows[r] + static_cast<size_t>(steps) * sizeof(P));
    };
    int64_t k = 0;
    for (constexpr int kSteps = 4; kPacked && k + kSteps <= entry.depth; k += kSteps) {
#pragma GCC unroll 4
      for (int u = 0; u < kSteps; ++u) step(u);
      advance(kSteps);
    }
    for (; k < entry.depth; ++k) {
      step(0);
      advance(1);
    }
  }
  const bool adds = kAddsLast && before.data != nullptr;
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      if (adds) sum[t][v] += load_as<S, L>(before.data + t * before.token + v * L);
      store_as<S, L>(after.data + t * after.token + v * L, sum[t][v]);
    }
  }
}

// A strip of V vectors for a group of tokens. Its first tiles ask for later W, a share each: one tile for all would
// wait for memory. With AVX2 half of W is asked for twice. Asking once is up to 2 % faster in cache and 3 % slower from
// memory.
template <class C, int V>
struct StripOfGroup {
  OutputsStrip<typename C::P> strip;
  const char* x;
  int64_t tokens, share;  // share: bytes of a block that a tile asks for
  int tiles_to_ask;
  TokenSums<const typename C::S> from;
  TokenSums<typename C::S> to;

  void multiply() {
    constexpr int kSums = kVectorBytes == 64 ? 24 : 12, T = V == 1 ? 16 : kSums / V;
    for (int64_t token = 0; token < tokens;) {
      const int64_t left = tokens - token;
      if (left >= T && !(T == 12 && left == 16) && !(T == 6 && left == 8)) token += tile<T>(token);
      else if (T > 8 && left >= 8) token += tile<8>(token);
      else if (T > 4 && left >= 4) token += tile<4>(token);
      else token += tile<1>(token);
    }
  }

 private:
  template <int T>
  BS_INLINE int tile(int64_t token) {
    using S = typename C::S;
    using P = typename C::P;
    constexpr int L = C::lanes;
    const char* at = x + token * strip.x_token;
    const TokenSums<const S> first{from.data == nullptr ? nullptr : from.data + token * from.token, from.token};
    const TokenSums<S> last{to.data + token * to.token, to.token};
    if (tiles_to_ask-- > 0) multiply_tokens<S, P, L, V, T, true>(strip, at, first, last);
    else multiply_tokens<S, P, L, V, T, false>(strip, at, first, last);
    strip.asked += share;
    return T;
  }
};

// Copies a block to [inputs][B outputs]; pairs to [inputs / 2][B].
template <class C, int B>
void copy_block_of(const ProductArgs& a, int64_t weight, typename C::P* to) {
  constexpr int L = C::lanes;
  const auto* w = static_cast<const typename C::T*>(a.w) + weight * B * B;
  if constexpr (kTogether<typename C::P> == 2) {
    for (int64_t k = 0; k < B && a.by_in; k += 2) {
      for (int64_t o = 0; o < B; o += L) {
        store_pairs<L>(to + k / 2 * B + o, pair_rows<L>(w + k * B + o, w + (k + 1) * B + o));
      }
    }
    for (int64_t o = 0; o < B && !a.by_in; o += L) {
      for (int64_t k = 0; k < B; k += 2 * L) {
        const auto row = [&](int r) __attribute__((always_inline)) { return load_pairs<L>(w + (o + r) * B + k); };
        transpose_pairs<L>(row, to + k / 2 * B + o, B);
      }
    }
  } else {
    using S = typename C::S;
    for (int64_t k = 0; k < B; k += L) {
      for (int64_t o = 0; o < B; o += L) {
        Vec<S, L> square[L];
#pragma GCC unroll 16
        for (int r = 0; r < L; ++r) square[r] = load_as<S, L>(w + (o + r) * B + k);
        transpose<S, L>(square);
#pragma GCC unroll 16
        for (int r = 0; r < L; ++r) store_as<S, L>(to + (k + r) * B + o, square[r]);
      }
    }
  }
}

template <class C>
void copy_block(const ProductArgs& a, int64_t weight, typename C::P* to) {
  if constexpr (C::lanes <= 8 || kOneVector<C>) {
    if (a.block == 16) return copy_block_of<C, 16>(a, weight, to);
  }
  switch (a.block) {
    case 32: return copy_block_of<C, 32>(a, weight, to);
    case 64: return copy_block_of<C, 64>(a, weight, to);
    default: return copy_block_of<C, 128>(a, weight, to);
  }
}

// Packed x of some tokens: the offset of the first token's first feature, and the distances to the next token and
// block.
struct TokenPanel {
  int64_t at, token, block;
};

template <class C>
TokenPanel token_panel(const ProductArgs& a, int64_t vector) {
  constexpr int64_t L = C::lanes;
  const int64_t first = vector / a.group_vectors * a.group_vectors;
  const int64_t tokens = least(a.group_vectors * L, a.n - first * L);
  const int64_t blocks = ceil_div(a.inputs, a.block);
  return {first % a.panel_vectors * L * blocks * a.block + (vector - first) * L * a.block, a.block, tokens * a.block};
}

// Packs one vector of tokens of x as [blocks][tokens of the group][b]. Rows of x are often 4 KB apart, which puts a
// block of all tokens into few sets of L1.
template <class C>
void pack_tokens(const ProductArgs& a, int64_t vector, int64_t first_feature, int64_t last_feature) {
  using T = typename C::T;
  constexpr int L = C::lanes;
  const int64_t token = vector * L, tokens = least<int64_t>(L, a.n - token);
  const TokenPanel panel = token_panel<C>(a, vector);
  const T* x = static_cast<const T*>(a.x) + token * a.x_token;
  T* to = static_cast<T*>(a.panels) + panel.at;
  for (int64_t f = first_feature; f < last_feature;) {
    const int64_t end = least(last_feature, f / a.block * a.block + a.block);
    T* run = to + f / a.block * panel.block + f % a.block;
    for (int64_t t = 0; t < tokens; ++t) {
      if (kOneVector<C> && (end - f) % L == 0) {  // AVX2 is 2 % faster by calls of memcpy
        for (int64_t i = 0; i < end - f; i += L) {
          store_as<T, L>(run + t * panel.token + i, load_as<T, L>(x + t * a.x_token + f + i));
        }
        continue;
      }
      __builtin_memcpy(run + t * panel.token, x + t * a.x_token + f, sizeof(T) * static_cast<size_t>(end - f));
    }
    f = end;
  }
}

// Lists the blocks of W of a chunk, each [inputs][b], copied if `copies` is given.
template <class C>
void list_chunk(const ProductArgs& a, const Chunk& chunk, Ahead<C>* ahead, int64_t x_block, typename C::P* copies,
                OutputsEntry<typename C::P>* list) {
  using P = typename C::P;
  constexpr int T = kTogether<P>;
  const int64_t block = static_cast<int64_t>(a.block) * a.block / T;
  for (int i = 0; i < chunk.count; ++i) {
    const BlockRef& ref = chunk.refs[i];
    const int64_t begin = static_cast<int64_t>(ref.from) * a.block;
    list[i] = {static_cast<const P*>(a.w) + ref.weight * block,
               ref.from * x_block * static_cast<int64_t>(sizeof(typename C::T)),
               least<int64_t>(a.block, a.inputs - begin) / T,
               ahead != nullptr ? ahead->next() : static_cast<const char*>(a.w)};
    if (copies == nullptr) continue;
    copy_block<C>(a, ref.weight, copies + i * block);
    list[i].w = copies + i * block;
  }
}

// x of a group of tokens, in place or packed.
template <class T>
struct TokensOf {
  const T* data;
  int64_t token, block;  // distances to the next token and block
};

template <class C>
TokensOf<typename C::T> tokens_of(const ProductArgs& a, int64_t token) {
  using T = typename C::T;
  if (!a.tokens_packed) return {static_cast<const T*>(a.x) + token * a.x_token, a.x_token, a.block};
  const TokenPanel panel = token_panel<C>(a, token / C::lanes);
  return {static_cast<const T*>(a.panels) + panel.at, panel.token, panel.block};
}

// All strips of a chunk: to [tokens][b] = from + x W.
template <class C, int V>
void multiply_strips(const ProductArgs& a, int count, OutputsEntry<typename C::P>* list, bool ask,
                     const TokensOf<typename C::T>& x, int64_t tokens, TokenSums<const typename C::S> from,
                     TokenSums<typename C::S> to) {
  constexpr int64_t kWidth = V * C::lanes, kSize = sizeof(typename C::T);
  const int64_t x_token = x.token * kSize, share = a.block / kTogether<typename C::P> * kLine;
  for (int64_t o = 0; o < a.block; o += kWidth) {
    StripOfGroup<C, V>{{list, count, a.block, o * a.block * kSize, x_token},
                       reinterpret_cast<const char*>(x.data),
                       tokens,
                       share,
                       ask ? V : 0,
                       from,
                       to}
        .multiply();
    for (int i = 0; i < count; ++i) list[i].w += kWidth;
    if (from.data != nullptr) from.data += kWidth;
    to.data += kWidth;
  }
}

// One piece for a group of tokens. W is copied in chunks of 16 KB: 32 KB are 15 % slower from memory at 50 %. Beside
// packed x, W in place is read in chunks of 8 KB: Zen 3, dgrad, b = 16, 50 % 977 us -> 898.
template <class C>
void multiply_outputs(const ProductArgs& a, const Piece& piece, Ahead<C>* ahead, int64_t token, int64_t tokens) {
  using S = typename C::S;
  using P = typename C::P;
  constexpr int L = C::lanes;
  const bool copied = kTogether<P> == 2 || !a.by_in;
  const int64_t block_bytes = static_cast<int64_t>(a.block) * a.block * static_cast<int64_t>(sizeof(typename C::T));
  const int64_t fitting = least<int64_t>(kMostOfChunk, (copied            ? 16 << 10
                                                        : a.tokens_packed ? 8 << 10
                                                                          : 32 << 10) /
                                                           block_bytes);
  const int most = fitting < 1 ? 1 : static_cast<int>(fitting);
  alignas(64) S sums[kGroupAlongOutputs * kMaxBlock];
  alignas(64) P copies[kMaxBlock * kMaxBlock / kTogether<P>];
  OutputsEntry<P> list[kMostOfChunk];
  const int64_t output = static_cast<int64_t>(piece.to) * a.block;
  TokenSums<S> end{};  // where sums may go straight from the registers
  if (piece.slot >= 0) {
    end = {partial_of<C>(a, piece.slot, token / L), a.block};
  } else if constexpr (!C::narrow) {
    if (is_plain(a) && output + a.block <= a.outputs) {
      end = {static_cast<S*>(a.y) + token * a.y_token + output, a.y_token};
    }
  }
  const TokensOf<typename C::T> x = tokens_of<C>(a, token);
  for (int32_t next = piece.first; next == piece.first || next < piece.last;) {
    const Chunk chunk{a.refs + next, least(most, piece.last - next)};
    list_chunk<C>(a, chunk, ahead, x.block, copied ? copies : nullptr, list);
    const TokenSums<const S> from{next == piece.first ? nullptr : sums, a.block};
    next += chunk.count;
    const TokenSums<S> to = next >= piece.last && end.data != nullptr ? end : TokenSums<S>{sums, a.block};
    const bool ask = ahead != nullptr;
    constexpr int kMost = kVectorBytes == 64 ? 4 : 2;  // vectors for which there are registers
    if (kOneVector<C> && a.block == L)
      multiply_strips<C, kOneVector<C> ? 1 : 2>(a, chunk.count, list, ask, x, tokens, from, to);
    else if (a.block >= kMost * L) multiply_strips<C, kMost>(a, chunk.count, list, ask, x, tokens, from, to);
    else multiply_strips<C, 2>(a, chunk.count, list, ask, x, tokens, from, to);
    if (chunk.count == 0) break;
  }
  if (end.data == nullptr) finish_tokens<C>(a, piece.to, token, tokens, sums);
}

template <class C>
void multiply_along_outputs(const ProductArgs& a, Range pieces, Range vectors) {
  Ahead<C> ahead(a, pieces);
  const int64_t first = vectors.first * C::lanes, last = least<int64_t>(vectors.last * C::lanes, a.n);
  for (int64_t p = pieces.first; p < pieces.last; ++p) {
    for (int64_t token = first; token < last; token += kGroupAlongOutputs) {
      multiply_outputs<C>(a, a.pieces[p], token == first ? &ahead : nullptr, token,
                          least(kGroupAlongOutputs, last - token));
    }
  }
}

}  // namespace
}  // namespace blocksparse::gemm
