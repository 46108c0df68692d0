// The inner loop of product.h: a tile of sums in registers over the blocks of a chunk.
#pragma once

#include "cpu/simd_tile.h"
#include "gemm/cpu/ahead.h"
#include "gemm/cpu/weights.h"

namespace blocksparse::gemm {
namespace {

// x of some vectors, [inputs][lanes] each: vector v begins at data + at[v], its rows are feature[v] apart.
template <class P>
struct XView {
  const P* data;
  const int64_t *at, *feature;
};

// One block of W and the rows of x that it meets.
struct Entry {
  int64_t x;          // the first row
  int64_t weight;     // which block of W
  int64_t depth;      // rows
  const char* later;  // a block of W that is used later
};

// The sums of output o and vector v are at data + output * o + vector * v, lanes side by side.
template <class S>
struct SumsAt {
  S* data = nullptr;
  int64_t output = 0, vector = 0;
};

struct Entries {
  const Entry* data;
  int count;
  bool ask;      // whether to ask for W that is used later
  int64_t part;  // the strip's part of a block, in bytes from its beginning
};

// The inner loop: to [O, V vectors] = from + W strip [O, inputs of the entries] x [inputs of the entries, V vectors].
// Not inlined: bf16, f16 and f32 share one copy, which halves the time to compile.
//   from  without data: 0
//   kAsk  AVX-512: asks for later W, some lines at a time, so that no burst holds up the products. AVX2: asks for x of
//         the next entry, packed side by side
template <class S, class P, int L, int O, int V, bool kAsk, class WView>
__attribute__((noinline)) void multiply_tile(const Entries& entries, const WView& w, const XView<P>& x,
                                             const SumsAt<const S>& from, const SumsAt<S>& to) {
  const SumsAt<const S> before = from;  // copies: a store to sums could change what a reference refers to
  const SumsAt<S> after = to;
  const int64_t feature = *x.feature, input = w.input();
  int64_t at[V];
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) at[v] = x.at[v];
  Vec<S, L> sum[O][V];
#pragma GCC unroll 16
  for (int o = 0; o < O; ++o) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      sum[o][v] = kAddsLast || before.data == nullptr
                      ? Vec<S, L>{}
                      : load_as<S, L>(before.data + o * before.output + v * before.vector);
    }
  }
  constexpr bool kAsksForW = kAsk && kVectorBytes == 64, kAsksForX = kAsk && !kAsksForW;
  constexpr int kPart = kUnroll * O * static_cast<int>(sizeof(P)) / kTogether<P>;
  for (int i = 0; i < entries.count; ++i) {
    const P* xb = x.data + entries.data[i].x * feature;
    const P* wb = w.block(entries.data[i].weight, i);
    const char* later = entries.data[i].later + entries.part;
    const Entry& next = entries.data[i + 1 < entries.count ? i + 1 : i];
    [[maybe_unused]] const P* next_x = x.data + next.x * feature + at[0];
    if constexpr (kAsksForW && WView::kScattered) {
      const auto* near = reinterpret_cast<const char*>(w.block(next.weight, i));
#pragma GCC unroll 8
      for (int byte = 0; byte < kPart; byte += kLine) __builtin_prefetch(near + byte);
    }
    auto step = [&]() __attribute__((always_inline)) {
      Vec<P, L> xv[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) xv[v] = in_register(operand<P, L>(xb + at[v]));
      xb = next_row(xb + feature);
#pragma GCC unroll 16
      for (int o = 0; o < O; ++o) {
        const Vec<P, L> wv = in_register(operand_in_all_lanes<P, L>(wb + o * WView::kOutput));
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) add_product<S, L>(sum[o][v], wv, xv[v]);
      }
      wb = next_row(wb + input);
    };
    const int64_t depth = WView::kDepth > 0 ? WView::kDepth : entries.data[i].depth;
    constexpr int kSteps = kUnroll / kTogether<P>;
    int64_t k = 0;
    for (; k + kSteps <= depth; k += kSteps) {
      if constexpr (kAsksForX) {
#pragma GCC unroll 16
        for (int row = 0; row < kUnroll * V * L; row += kLine / static_cast<int>(sizeof(P))) {
          __builtin_prefetch(next_x + row);
        }
        next_x += kUnroll * feature;
      }
      if constexpr (kAsksForW) {
#pragma GCC unroll 8
        for (int byte = 0; byte < kPart; byte += kLine) __builtin_prefetch(later + byte);
        later += kPart;
      }
#pragma GCC unroll 8
      for (int u = 0; u < kSteps; ++u) step();
    }
    for (; k < depth; ++k) step();
  }
  const bool adds = kAddsLast && before.data != nullptr;
#pragma GCC unroll 16
  for (int o = 0; o < O; ++o) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      if (adds) sum[o][v] += load_as<S, L>(before.data + o * before.output + v * before.vector);
      store_as<S, L>(after.data + o * after.output + v * after.vector, sum[o][v]);
    }
  }
}

}  // namespace
}  // namespace blocksparse::gemm
