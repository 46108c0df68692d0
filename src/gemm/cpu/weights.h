// How product.h reads a strip of rows of W: in place, or from a copy.
#pragma once

#include "gemm/cpu/finish.h"

namespace blocksparse::gemm {
namespace {

// A view of a strip of W: W(o, k) is block()[o * kOutput + k * input()]. kDepth is the number of inputs of every block,
// 0 if unknown: loops of known length make b = 8 3 to 5 % faster.
//
// In place with rows as outputs (fprop). The block size is a constant, so all rows are reached from one pointer.
template <class P, int B, bool kWhole = false>
struct RowsOfW {
  const P* values;
  int strip;
  static constexpr int kOutput = B / kTogether<P>, kDepth = kWhole ? kOutput : 0;
  static constexpr bool kScattered = false;
  BS_INLINE const P* block(int64_t weight, int) const { return values + (weight * B + strip) * kOutput; }
  BS_INLINE int64_t input() const { return 1; }
};
// In place with columns as outputs (dgrad). Blocks of 8 lie anywhere, a few lines each, and kAgain asks for them once
// more. It is a type of its own: a test in the loop takes 12 % (Xeon).
template <class S, int B, bool kAgain = false>
struct ColumnsOfW {
  const S* values;
  int strip;
  int64_t block_size;
  static constexpr int kOutput = 1, kDepth = B;
  static constexpr bool kScattered = kAgain;
  BS_INLINE const S* block(int64_t weight, int) const { return values + weight * input() * input() + strip; }
  BS_INLINE int64_t input() const { return B > 0 ? B : block_size; }
};
// A widened, gated copy of some strips of the chunk's blocks.
template <class P>
struct CopyOfW {
  const P* strips;  // [chunk][b][width]
  int block_size, width;
  static constexpr int kOutput = 1, kDepth = 0;
  static constexpr bool kScattered = false;
  BS_INLINE const P* block(int64_t, int position) const { return strips + position * block_size * width; }
  BS_INLINE int64_t input() const { return width; }
};

// copy[k - first][o] = gate * W(strip + o, k), widened, for Q of the O rows of a strip and inputs [first, last), in
// whole squares.
template <class C, int O, int Q>
BS_INLINE void copy_rows(const ProductArgs& a, int64_t weight, typename C::S gate, int strip, Range inputs,
                         typename C::S* copy) {
  using S = typename C::S;
  const auto* w = static_cast<const typename C::T*>(a.w) + weight * a.block * a.block;
  if (a.by_in) {
    for (int64_t k = inputs.first; k < inputs.last; ++k, copy += O) {
      store_as<S, Q>(copy, load_as<S, Q>(w + k * a.block + strip) * gate);
    }
    return;
  }
  for (int64_t k = inputs.first; k < inputs.last; k += Q, copy += Q * O) {
    Vec<S, Q> square[Q];
#pragma GCC unroll 8
    for (int o = 0; o < Q; ++o) square[o] = load_as<S, Q>(w + static_cast<int64_t>(strip + o) * a.block + k) * gate;
    transpose<S, Q>(square);
#pragma GCC unroll 8
    for (int i = 0; i < Q; ++i) store_as<S, Q>(copy + i * O, square[i]);
  }
}

// copy[k / 2][o] = (W(strip + o, k), W(strip + o, k + 1)), 0 beyond the matrix. Gates scale the sums instead.
template <int O>
BS_INLINE void copy_pairs(const ProductArgs& a, const BlockRef& ref, int strip, BFloat16Pair* copy) {
  const auto* w = static_cast<const BFloat16*>(a.w) + static_cast<int64_t>(ref.weight) * a.block * a.block;
  const int depth = static_cast<int>(least<int64_t>(a.block, a.inputs - static_cast<int64_t>(ref.from) * a.block));
  for (int k = 0; k < depth; k += 2, copy += O) {
    if (a.by_in) {
      const BFloat16* row = w + static_cast<int64_t>(k) * a.block + strip;
      if (k + 1 < depth) store_pairs<O>(copy, pair_rows<O>(row, row + a.block));
      else store_pairs<O>(copy, half_pairs<O>(row));
      continue;
    }
    for (int o = 0; o < O; ++o) {  // only for matrices that end in half a pair
      const BFloat16* row = w + static_cast<int64_t>(strip + o) * a.block + k;
      copy[o] = {row[0].bits, k + 1 < depth ? row[1].bits : uint16_t{0}};
    }
  }
}

// Copies as many rows at a time as a vector holds: GCC would take wider vectors apart lane by lane.
template <class C, int O>
BS_INLINE void copy_gated(const ProductArgs& a, int64_t weight, typename C::S gate, int strip, Range inputs,
                          typename C::S* copy) {
  constexpr int Q = O < C::lanes ? O : C::lanes;
#pragma GCC unroll 8
  for (int o = 0; o < O; o += Q) copy_rows<C, O, Q>(a, weight, gate, strip + o, inputs, copy + o);
}

// The number of outputs to copy at a time. Pairs copy a whole vector of them, which takes half the time of two strips
// of 8: Zen 5, dgrad, b = 32, 50 % 219 us -> 208.
template <class C>
int copied_outputs(const ProductArgs& a) {
  return kTogether<typename C::P> == 2 && a.block >= 2 * kSmallestBlock ? 2 * kSmallestBlock : C::tile.outputs;
}

template <class C>
BS_INLINE void copy_strips(const ProductArgs& a, const BlockRef& ref, int strip, typename C::P* copy) {
  constexpr int O = C::tile.outputs;
  if constexpr (kTogether<typename C::P> == 1) {
    copy_gated<C, O>(a, ref.weight, gate_of<C>(a, ref.weight), strip, {0, a.block}, copy);
  } else if (copied_outputs<C>(a) == O) {
    copy_pairs<O>(a, ref, strip, copy);
  } else {
    copy_pairs<2 * kSmallestBlock>(a, ref, strip, copy);
  }
}

// Whether W is read from copies. f64 is: it serves gradient checks and is not worth kernels of its own.
template <class C>
bool copies(const ProductArgs& a) {
  if (kTogether<typename C::P> == 2) return a.by_in || a.inputs % 2 != 0;
  return C::dtype != DType::f32 || a.gates != nullptr;
}

}  // namespace
}  // namespace blocksparse::gemm
