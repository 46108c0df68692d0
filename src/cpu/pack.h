// Copies between activations and panels: straight or transposed, widening on the way in and narrowing on the way out.
#pragma once

#include "cpu/simd.h"

namespace blocksparse {
namespace {

// to[c][r] = from[r][c] for r < rows <= L, c < columns; rows up to L of `to` are filled with 0.
//   from  T, rows `from_stride` apart      to  S, rows `to_stride` apart
template <class S, int L, class T>
BS_INLINE void pack_transposed(const T* from, int64_t from_stride, int64_t rows, int64_t columns, S* to,
                               int64_t to_stride) {
  for (int64_t c = 0; c < columns; c += L) {
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

}  // namespace
}  // namespace blocksparse
