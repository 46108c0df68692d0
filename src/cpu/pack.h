// Copies between activations and panels: straight or transposed. Elements are widened on the way in and narrowed on the
// way out.
#pragma once

#include "cpu/simd.h"

namespace blocksparse {
namespace {

// to[c][r] = from[r][c] for r < rows <= L, c < columns, and 0 for rows <= r < L.
//   from  T, rows `from_stride` apart      to  S, rows `to_stride` apart
template <class S, int L, class T>
BS_INLINE void pack_transposed(const T* from, int64_t from_stride, int64_t rows, int64_t columns, S* to,
                               int64_t to_stride) {
  int64_t c = 0;
  // Whole squares need no test of each row.
  for (; rows >= L && c + L <= columns; c += L) {
    Vec<S, L> square[L];
#pragma GCC unroll 16
    for (int r = 0; r < L; ++r) square[r] = load_as<S, L>(from + r * from_stride + c);
    transpose<S, L>(square);
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) store_as<S, L>(to + (c + i) * to_stride, square[i]);
  }
  for (; c < columns; c += L) {
    const int64_t width = least<int64_t>(L, columns - c);
    Vec<S, L> square[L];
#pragma GCC unroll 16
    for (int r = 0; r < L; ++r) {
      square[r] = r < rows ? load_first<S, L>(from + r * from_stride + c, width) : Vec<S, L>{};
    }
    transpose<S, L>(square);
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      if (i < width) store_as<S, L>(to + (c + i) * to_stride, square[i]);
    }
  }
}

// to[i] = from[i] for i < count, 0 for count <= i < width; width is a multiple of L.
template <class S, int L, class T>
BS_INLINE void pack_run(const T* from, int64_t count, int64_t width, S* to) {
  for (int64_t i = 0; i < width; i += L) {
    store_as<S, L>(to + i, load_first<S, L>(from + i, least<int64_t>(L, count - i)));
  }
}

// The number of rows or inputs that an element of a panel holds.
template <class P>
constexpr int kTogether = 1;
template <>
constexpr int kTogether<BFloat16Pair> = 2;

// (first[i], second[i]) for N elements of two rows.
template <int N>
BS_INLINE Vec<uint32_t, N> pair_rows(const BFloat16* first, const BFloat16* second) {
  Vec<uint16_t, N> low, high;
  __builtin_memcpy(&low, first, sizeof(low));
  __builtin_memcpy(&high, second, sizeof(high));
  return widen<N>(low) | widen<N>(high) << 16;
}

#if defined(__aarch64__)
// By zips: GCC 12 moves vectors wider than a register through other registers and memory.
template <>
BS_INLINE Vec<uint32_t, 8> pair_rows<8>(const BFloat16* first, const BFloat16* second) {
  return bits_as<Vec<uint32_t, 8>>(vzipq_u16(vld1q_u16(&first->bits), vld1q_u16(&second->bits)));
}
template <>
BS_INLINE Vec<uint32_t, 16> pair_rows<16>(const BFloat16* first, const BFloat16* second) {
  const uint16x8x2_t low = vzipq_u16(vld1q_u16(&first->bits), vld1q_u16(&second->bits));
  const uint16x8x2_t high = vzipq_u16(vld1q_u16(&first[8].bits), vld1q_u16(&second[8].bits));
  return bits_as<Vec<uint32_t, 16>>(uint16x8x4_t{{low.val[0], low.val[1], high.val[0], high.val[1]}});
}
#endif

// (row[i], 0)
template <int N>
BS_INLINE Vec<uint32_t, N> half_pairs(const BFloat16* row) {
  Vec<uint16_t, N> half;
  __builtin_memcpy(&half, row, sizeof(half));
  return widen<N>(half);
}

template <int N>
BS_INLINE Vec<uint32_t, N> load_pairs(const void* from) {
  Vec<uint32_t, N> pairs;
  __builtin_memcpy(&pairs, from, sizeof(pairs));
  return pairs;
}

template <int N>
BS_INLINE void store_pairs(BFloat16Pair* to, Vec<uint32_t, N> pairs) {
  __builtin_memcpy(to, &pairs, sizeof(pairs));
}

// to[c][r] = row(r)[c] for squares of Q x Q pairs.
template <int Q, class Row>
BS_INLINE void transpose_pairs(Row row, BFloat16Pair* to, int64_t to_stride) {
  Vec<uint32_t, Q> square[Q];
#pragma GCC unroll 16
  for (int r = 0; r < Q; ++r) square[r] = row(r);
  transpose<uint32_t, Q>(square);
#pragma GCC unroll 16
  for (int c = 0; c < Q; ++c) store_pairs<Q>(to + c * to_stride, square[c]);
}

}  // namespace
}  // namespace blocksparse
