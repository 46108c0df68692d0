// fprop and dgrad for up to four tokens. Vectors run along features: a vector of tokens would be mostly empty, and
// packing x would cost as much as the product.
//   x [n][inputs], read in place     w [blocks, b, b], read once for all tokens     sums [n][b]
// Who does what
//   few          one piece (an output block and its list of blocks), all tokens
//                  fprop: for each strip of rows of W, sums of products along the row, added across lanes at the end
//                  dgrad: for each strip of columns of W, a row at a time, scaled by its dy
//   combine_few  adds the sums of slices in their fixed order, then finishes
#pragma once

#include "gemm/cpu/finish.h"

namespace blocksparse::gemm {
namespace {

constexpr int kSumsInFlight = 8;  // independent sums that keep two FMA units of latency 4 busy

// The sums of the lanes of eight vectors. Adding halves while they are interleaved takes 14 shuffles, a transpose 24.
template <class S>
BS_INLINE Vec<S, 8> sums_of_eight(const Vec<S, 8> (&v)[8]) {
  Vec<S, 8> twos[4], fours[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    twos[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13) +
              __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    fours[i] = __builtin_shufflevector(twos[2 * i], twos[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(twos[2 * i], twos[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  return __builtin_shufflevector(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// totals[i] = the sum of the lanes of v[i]. Eight vectors are folded to 8 lanes or fewer, transposed and added as rows.
template <class S, int L>
BS_INLINE void sums_of(Vec<S, L> (&v)[kSumsInFlight], S* totals) {
  if constexpr (L > kSumsInFlight) {
    constexpr int kHalf = L / 2;
    Vec<S, kHalf> folded[kSumsInFlight];
#pragma GCC unroll 8
    for (int i = 0; i < kSumsInFlight; ++i) {
      Vec<S, kHalf> half[2];
      __builtin_memcpy(half, &v[i], sizeof(half));
      folded[i] = half[0] + half[1];
    }
    sums_of<S, kHalf>(folded, totals);
  } else if constexpr (L == 8) {
    store_as<S, L>(totals, sums_of_eight<S>(v));
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < kSumsInFlight; i += L) {
      Vec<S, L> square[L];
#pragma GCC unroll 8
      for (int r = 0; r < L; ++r) square[r] = v[i + r];
      transpose<S, L>(square);
      Vec<S, L> total = square[0];
#pragma GCC unroll 8
      for (int r = 1; r < L; ++r) total += square[r];
      store_as<S, L>(totals + i, total);
    }
  }
}

// One block of a piece's list, with what every strip needs to know of it.
template <class C>
struct FewBlock {
  const typename C::T* w;
  const typename C::T* x;  // of the first token
  typename C::S gate;
  int depth;  // inputs that exist

  FewBlock(const ProductArgs& a, const BlockRef& ref, int64_t token) {
    const int64_t begin = static_cast<int64_t>(ref.from) * a.block;
    w = static_cast<const typename C::T*>(a.w) + static_cast<int64_t>(ref.weight) * a.block * a.block;
    x = static_cast<const typename C::T*>(a.x) + token * a.x_token + begin;
    gate = a.gates == nullptr ? typename C::S{1} : static_cast<const typename C::S*>(a.gates)[ref.weight];
    depth = static_cast<int>(least<int64_t>(a.block, a.inputs - begin));
  }
  bool skipped(const ProductArgs& a) const { return a.gates != nullptr && gate == typename C::S{0}; }
};

// Asks for W of the next row, for several tokens or for rows with slices. Each block of a list asks for a strip's share
// of the block at its position in the next list, which is not longer, because lists are sorted by length. Zen 5, 1024 x
// 1024, 10 %, 4 tokens, b = 32: 66 us -> 24 from memory, 12 -> 16 in cache.
class FewAhead {
 public:
  template <class C>
  static FewAhead make(const ProductArgs& a, const Piece& piece, int64_t token, int strip, int width) {
    const Piece* next = &piece + 1;
    FewAhead ahead;
    if (token > 0 || next >= a.pieces + a.piece_count || next->first == next->last) return ahead;
    const int64_t row = a.block * static_cast<int64_t>(sizeof(typename C::T));
    ahead.refs_ = a.refs + next->first;
    ahead.last_ = next->last - next->first - 1;
    ahead.part_ = static_cast<const char*>(a.w) + strip * row;
    ahead.bytes_ = width * row;
    ahead.block_ = a.block * row;
    return ahead;
  }
  BS_INLINE void ask(int32_t i) const {
    if (refs_ == nullptr) return;
    const char* w = part_ + refs_[least(i, last_)].weight * block_;
    for (int64_t byte = 0; byte < bytes_; byte += 64) __builtin_prefetch(w + byte);
  }

 private:
  const BlockRef* refs_ = nullptr;
  int32_t last_ = 0;
  const char* part_ = nullptr;
  int64_t bytes_ = 0, block_ = 0;
};

// Asks for W 4 KB ahead, for one token, with rows in the order of refs. The first strip of a block asks for the whole
// block. In fprop that is one stream, which the hardware then follows; shares of 8 rows or every other line are not
// followed. In dgrad blocks lie anywhere; for large ones a fourth of the lines starts the hardware. Zen 5, 1024 x 1024,
// 10 %, fprop, b = 32, against asking for the next row: 27 us -> 14 from memory, 4.3 -> 5.2 in cache.
//
// Nothing is asked for where the hardware follows large blocks by itself: Zen 3, fprop, b = 32 10.9 us -> 8.8 in cache.
template <class C>
BS_INLINE void ask_in_order(const ProductArgs& a, int32_t i, int64_t b) {
  constexpr int64_t kLater = 4 << 10;
  const bool follows = kVectorBytes == 32 ? !a.by_in : a.large_unasked;  // the hardware prefetches it by itself
  if (a.refs_in_order == 0 || (follows && b >= 32)) return;
  const int64_t block = b * b * static_cast<int64_t>(sizeof(typename C::T));
  const auto* w = static_cast<const char*>(a.w);
  if (!a.by_in) {
    w += a.refs[i].weight * block + kLater;
    for (int64_t byte = 0; byte < block; byte += 64) __builtin_prefetch(w + byte);
    return;
  }
  const int64_t later = block < kLater ? kLater / block : 1;
  w += a.refs[least<int64_t>(i + later, a.refs_in_order - 1)].weight * block;
  for (int64_t byte = 0, step = block < kLater ? 64 : 256; byte < block; byte += step) __builtin_prefetch(w + byte);
}

// sums[t][strip + o] = sum over the list of W(strip + o, k) x(t, k).
//   B  the block size, if all inputs exist and there are no gates; 0: any block
template <class C, int L, int Tokens, int B>
__attribute__((noinline)) void few_rows(const ProductArgs& a, const Piece& piece, int64_t token, int strip,
                                        typename C::S* sums) {
  using S = typename C::S;
  constexpr int O = kSumsInFlight / Tokens;
  const int size = B > 0 ? B : a.block;
  const auto ahead = Tokens > 1 ? FewAhead::make<C>(a, piece, token, strip, O) : FewAhead();
  Vec<S, L> sum[O][Tokens] = {};
  for (int32_t i = piece.first; i < piece.last; ++i) {
    const FewBlock<C> block(a, a.refs[i], token);
    if constexpr (Tokens > 1) ahead.ask(i - piece.first);
    else if (strip == 0) ask_in_order<C>(a, i, size);
    if (block.skipped(a)) continue;
    const auto* w = block.w + strip * size;
    auto step = [&](int k, auto load) __attribute__((always_inline)) {
      Vec<S, L> xv[Tokens];
#pragma GCC unroll 4
      for (int t = 0; t < Tokens; ++t) {
        const Vec<S, L> loaded = load(block.x + t * a.x_token + k);
        xv[t] = in_register(B > 0 ? loaded : loaded * block.gate);
      }
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o) {
        const Vec<S, L> wv = load(w + o * size + k);
#pragma GCC unroll 4
        for (int t = 0; t < Tokens; ++t) sum[o][t] += wv * xv[t];
      }
    };
    const int depth = B > 0 ? B : block.depth;
    int k = 0;
#pragma GCC unroll 2
    for (; k + L <= depth; k += L)
      step(k, [](const auto* p) __attribute__((always_inline)) { return load_as<S, L>(p); });
    if (k < depth)
      step(k, [&](const auto* p) __attribute__((always_inline)) { return load_first<S, L>(p, block.depth - k); });
  }
  Vec<S, L> flat[kSumsInFlight];
#pragma GCC unroll 8
  for (int i = 0; i < kSumsInFlight; ++i) flat[i] = sum[i / Tokens][i % Tokens];
  S totals[kSumsInFlight];
  sums_of<S, L>(flat, totals);
  for (int o = 0; o < O; ++o) {
    for (int t = 0; t < Tokens; ++t) sums[t * a.block + strip + o] = totals[o * Tokens + t];
  }
}

// sums[t][strip + i] = sum over the list of W(k, strip + i) dy(t, k), for V vectors of columns. If V * Tokens sums are
// too few to keep the FMA units busy, rows take turns at several sets of sums.
template <class C, int L, int V, int Tokens, int B>
__attribute__((noinline)) void few_columns(const ProductArgs& a, const Piece& piece, int64_t token, int strip,
                                           typename C::S* sums) {
  using S = typename C::S;
  constexpr int R = kSumsInFlight / (V * Tokens);
  const int size = B > 0 ? B : a.block;
  const auto ahead = Tokens > 1 ? FewAhead::make<C>(a, piece, token, strip, V * L) : FewAhead();
  Vec<S, L> sum[R][Tokens][V] = {};
  for (int32_t i = piece.first; i < piece.last; ++i) {
    const FewBlock<C> block(a, a.refs[i], token);
    if constexpr (Tokens > 1) ahead.ask(i - piece.first);
    else if (strip == 0) ask_in_order<C>(a, i, size);
    if (block.skipped(a)) continue;
    const int depth = B > 0 ? B : block.depth;
    auto step = [&](int k, int r) __attribute__((always_inline)) {
      Vec<S, L> wv[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) wv[v] = in_register(load_as<S, L>(block.w + k * size + strip + v * L));
#pragma GCC unroll 4
      for (int t = 0; t < Tokens; ++t) {
        const S one = load_as<S, 1>(block.x + t * a.x_token + k)[0];
        const Vec<S, L> d = broadcast<S, L>(B > 0 ? one : one * block.gate);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[r][t][v] += d * wv[v];
      }
    };
    int k = 0;
#pragma GCC unroll 1
    for (; k + R <= depth; k += R) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) step(k + r, r);
    }
    for (; k < depth; ++k) step(k, 0);
  }
  for (int t = 0; t < Tokens; ++t) {
    for (int v = 0; v < V; ++v) {
      Vec<S, L> total = sum[0][t][v];
      for (int r = 1; r < R; ++r) total += sum[r][t][v];
      store_as<S, L>(sums + t * a.block + strip + v * L, total);
    }
  }
}

// sum[q] += rows R q to R q + R - 1 of a block times what they meet of x: all 8 elements (rows are outputs), or one
// element for each row (kByIn). R rows make a vector.
template <class S, int R, bool kByIn, class T, int... Q>
BS_INLINE void add_rows(Vec<S, 8 * R> (&sum)[8 / R], const T* w, Vec<S, 8> x8, std::integer_sequence<int, Q...>) {
  const auto of_rows = [&]<int First>() __attribute__((always_inline)) {
    constexpr int F = kByIn ? First : 0, N = kByIn ? F + 1 : 0, I = kByIn ? 0 : 1;
    if constexpr (R == 1)
      return __builtin_shufflevector(x8, x8, F, F + I, F + 2 * I, F + 3 * I, F + 4 * I, F + 5 * I, F + 6 * I,
                                     F + 7 * I);
    else
      return __builtin_shufflevector(x8, x8, F, F + I, F + 2 * I, F + 3 * I, F + 4 * I, F + 5 * I, F + 6 * I, F + 7 * I,
                                     N, N + I, N + 2 * I, N + 3 * I, N + 4 * I, N + 5 * I, N + 6 * I, N + 7 * I);
  };
  ((sum[Q] += load_as<S, 8 * R>(w + 8 * R * Q) * of_rows.template operator()<R * Q>()), ...);
}

// One token and whole blocks of 8, where a vector holds one or two rows of a block.
//   fprop  vector q of sums: lanes of row q, or of rows 2 q and 2 q + 1
//   dgrad  vector q of sums: these rows, each scaled by its dy
// Zen 5, 1024 x 1024, 10 %, fprop, W in L2: 11.4 us -> 5.9 against half a vector a row. Zen 3: 16.3 us -> 9.6 against
// few_rows.
template <class C, bool kByIn>
__attribute__((noinline)) void few_eights(const ProductArgs& a, const Piece& piece, int64_t token,
                                          typename C::S* sums) {
  using S = typename C::S;
  constexpr int B = kSmallestBlock, R = C::lanes / B;
  Vec<S, B * R> sum[B / R] = {};
  for (int32_t i = piece.first; i < piece.last; ++i) {
    ask_in_order<C>(a, i, B);
    const BlockRef ref = a.refs[i];
    const S gate = gate_of<C>(a, ref.weight);
    if (gate == S{0}) continue;
    const auto* w = static_cast<const typename C::T*>(a.w) + static_cast<int64_t>(ref.weight) * B * B;
    const auto* x = static_cast<const typename C::T*>(a.x) + token * a.x_token + static_cast<int64_t>(ref.from) * B;
    Vec<S, B> x8 = load_as<S, B>(x);
    if (a.gates != nullptr) x8 *= gate;
    add_rows<S, R, kByIn>(sum, w, x8, std::make_integer_sequence<int, B / R>());
  }
  Vec<S, B> row[B];
  __builtin_memcpy(row, sum, sizeof(row));
  if constexpr (kByIn) {
    store_as<S, B>(sums, ((row[0] + row[1]) + (row[2] + row[3])) + ((row[4] + row[5]) + (row[6] + row[7])));
  } else {
    sums_of<S, B>(row, sums);
  }
}

template <class C, int L, int Tokens, int B>
void few_strips_of(const ProductArgs& a, const Piece& piece, int64_t token, typename C::S* sums) {
  if (!a.by_in) {
    for (int strip = 0; strip < a.block; strip += kSumsInFlight / Tokens) {
      few_rows<C, L, Tokens, B>(a, piece, token, strip, sums);
    }
    return;
  }
  for (int strip = 0; strip < a.block;) {
    if (strip + 2 * L <= a.block) {
      few_columns<C, L, 2, Tokens, B>(a, piece, token, strip, sums);
      strip += 2 * L;
    } else {
      few_columns<C, L, 1, Tokens, B>(a, piece, token, strip, sums);
      strip += L;
    }
  }
}

// AVX2 and one token: the block size is a constant and each block needs one pointer. Zen 3, 1024 x 1024, 10 %, fprop, b
// = 32, in cache: 9.8 us -> 6.8. Reading W alone takes 5.
template <class C, int L, int Tokens>
void few_strips(const ProductArgs& a, const Piece& piece, int64_t token, typename C::S* sums) {
  if constexpr (Tokens == 1 && kVectorBytes == 32 && C::dtype == DType::f32) {
    if (a.inputs % a.block == 0 && a.gates == nullptr) {
      switch (a.block) {
        case 16: return few_strips_of<C, L, Tokens, 16>(a, piece, token, sums);
        case 32: return few_strips_of<C, L, Tokens, 32>(a, piece, token, sums);
        case 64: return few_strips_of<C, L, Tokens, 64>(a, piece, token, sums);
        default: break;
      }
    }
  }
  few_strips_of<C, L, Tokens, 0>(a, piece, token, sums);
}

template <class C, int Tokens>
void few_tokens(const ProductArgs& a, const Piece& piece, int64_t token, typename C::S* sums) {
  if constexpr (Tokens == 1 && C::lanes % kSmallestBlock == 0) {
    if (a.block == kSmallestBlock && a.inputs % kSmallestBlock == 0) {
      return a.by_in ? few_eights<C, true>(a, piece, token, sums) : few_eights<C, false>(a, piece, token, sums);
    }
  }
  if (C::lanes > kSmallestBlock && a.block < C::lanes) few_strips<C, kSmallestBlock, Tokens>(a, piece, token, sums);
  else few_strips<C, C::lanes, Tokens>(a, piece, token, sums);
}

template <class C>
typename C::S* partial_of_few(const ProductArgs& a, int64_t slot) {
  return static_cast<typename C::S*>(a.partial) + slot * a.n * a.block;
}

template <class C>
void few(const ProductArgs& a, int64_t index) {
  using S = typename C::S;
  const Piece& piece = a.pieces[index];
  alignas(64) S own[kUnpackedTokens * kMaxBlock];
  S* sums = piece.slot < 0 ? own : partial_of_few<C>(a, piece.slot);
  int64_t t = 0;
  for (; t + 4 <= a.n; t += 4) few_tokens<C, 4>(a, piece, t, sums + t * a.block);
  for (; t + 2 <= a.n; t += 2) few_tokens<C, 2>(a, piece, t, sums + t * a.block);
  for (; t < a.n; ++t) few_tokens<C, 1>(a, piece, t, sums + t * a.block);
  if (piece.slot < 0) finish_tokens<C>(a, piece.to, 0, a.n, sums);
}

template <class C>
void combine_few(const ProductArgs& a, int64_t split) {
  using S = typename C::S;
  const Split& s = a.splits[split];
  alignas(64) S sums[kUnpackedTokens * kMaxBlock] = {};
  for (int64_t slot = s.first_slot; slot < s.first_slot + s.slots; ++slot) {
    const S* part = partial_of_few<C>(a, slot);
    for (int64_t i = 0; i < a.n * a.block; ++i) sums[i] += part[i];
  }
  finish_tokens<C>(a, s.to, 0, a.n, sums);
}

}  // namespace
}  // namespace blocksparse::gemm
