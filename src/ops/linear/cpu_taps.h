// Convolutions: the product's other loop, in which outputs are the vector dimension and pixels are broadcast.
//   x panels [in blocks][round][b], blocks of kTapInputs if they are larger: grids of positions with zeros around the
//   images, so that no tap leaves them; a tap is x some positions further
//   W as strips [blocks][strips][taps][b inputs][strip of outputs], copied once a call
//   sums [pixels][strip]
// Then x is packed without a transpose, y is stored as it comes, no lane is spent on what is no pixel, and what the
// loop reads lies side by side: lines of x for whole blocks, W in the order of use. Who does what
//   pack_tap_weights  some blocks of W, widened and gated
//   multiply_taps     one row of blocks for some pixels: for each group of them, for each strip:
//                       for each kTapDepth inputs of all blocks and taps: W stays in L1
//                         for each tile of pixels: sums in registers
//                       then finish by runs of pixels
#pragma once

#include "ops/linear/cpu_product.h"

namespace blocksparse::linear {
namespace {

constexpr int kTapDepth = 288;  // inputs of a chunk
constexpr int kTapPixels = 96;  // of a group: whole tiles of any width

// Calls body.operator()<L, V>(): a strip is V vectors of L outputs, one where a block has no more.
template <class C, class Body>
auto with_strip(int block, Body body) {
  constexpr int L = C::lanes;
  if (block >= 2 * L) return body.template operator()<L, 2>();
  if constexpr (L > kSmallestBlock) {
    if (block < L) return body.template operator()<kSmallestBlock, 1>();
  }
  return body.template operator()<L, 1>();
}

// Pixels of a tile: as many sums as the product's tile, but no more addresses than there are registers.
template <class C, int V>
constexpr int kTapTile = least(C::tile.outputs * C::tile.vectors / V, 8);

// Some inputs of one block at one tap.
template <class S>
struct TapEntry {
  int64_t x;   // offset of the first one
  const S* w;  // [inputs][strip]
  int64_t depth;
  const int64_t* at;  // where it finds each pixel of the group
};

// The inner loop: sums [P][V vectors] (+)= x [P pixels from `pixel` on, inputs of the entries] W [inputs, strip].
template <class S, int L, int V, int P>
__attribute__((noinline)) void tap_tile(const TapEntry<S>* entries, int count, const S* x, int64_t pixel, S* sums,
                                        bool first) {
  Vec<S, L> sum[P][V];
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[p][v] = first ? Vec<S, L>{} : load_as<S, L>(sums + (p * V + v) * L);
  }
  for (const TapEntry<S>* e = entries; e != entries + count; ++e) {
    const S *xb = x + e->x, *wb = e->w;
    int64_t from[P];
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) from[p] = e->at[pixel + p];
    auto step = [&]() __attribute__((always_inline)) {
      Vec<S, L> wv[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) wv[v] = in_register(load_as<S, L>(wb + v * L));
      wb = next_row(wb + V * L);
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) {
        const Vec<S, L> xv = in_register(broadcast<S, L>(xb[from[p]]));
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) sum[p][v] = multiply_add<S, L>(sum[p][v], xv, wv[v]);
      }
      xb = next_row(xb + 1);
    };
    int64_t k = e->depth;
    for (; k >= kUnroll; k -= kUnroll) {
#pragma GCC unroll 8
      for (int u = 0; u < kUnroll; ++u) step();
    }
    for (; k > 0; --k) step();
  }
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) store_as<S, L>(sums + (p * V + v) * L, sum[p][v]);
  }
}

template <class C>
void pack_tap_weights(const TapArgs& t, int64_t first_block, int64_t last_block) {
  using S = typename C::S;
  const ProductArgs& a = t.product;
  with_strip<C>(a.block, [&]<int L, int V>() {
    constexpr int O = L * V;
    for (int64_t block = first_block; block < last_block; ++block) {
      const S gate = gate_of<C>(a, block);
      S* to = static_cast<S*>(t.weights) + block * t.taps * a.block * a.block;
      for (int strip = 0; strip < a.block; strip += O) {
        for (int64_t tap = 0; tap < t.taps; ++tap, to += a.block * O) {
          copy_gated<C, O>(a, block * t.taps + tap, gate, strip, {0, a.block}, to);
        }
      }
    }
  });
}

// Some pixels, whose images and places have been looked up.
struct TapGroup {
  int64_t count;
  int64_t at[kTapPixels];  // offset in a panel, of whole tiles; with sources, position of the image
  int64_t place[kTapPixels];
  int64_t pixel[kTapPixels];  // of y, in elements from the first image
};

// Where one tap finds the pixels. Whether it finds any.
inline bool look_up(const TapArgs& t, int64_t tap, const TapGroup& group, int64_t width, int64_t* at) {
  const int64_t* source = t.sources + tap * t.places;
  bool any = false;
  for (int64_t i = 0; i < group.count; ++i) {
    const int64_t from = source[group.place[i]];
    at[i] = (from < 0 ? t.nothing : group.at[i] + from) * width;
    any = any || from >= 0;
  }
  for (int64_t i = group.count; i < kTapPixels; ++i) at[i] = t.nothing * width;
  return any;
}

// Sums of one strip of a group. Where W has not been copied, each chunk's is.
template <class C, int L, int V>
void sum_strip(const TapArgs& t, int64_t row, int strip, const TapGroup& group, typename C::S* sums) {
  using S = typename C::S;
  constexpr int O = L * V, P = kTapTile<C, V>, kMost = kTapDepth / kSmallestBlock;
  const ProductArgs& a = t.product;
  const int64_t width = least<int64_t>(a.block, kTapInputs);
  const auto* x = static_cast<const S*>(t.panels);
  TapEntry<S> entries[kMost];
  alignas(64) S copies[kTapDepth * O];
  int64_t looked_up[kMost][kTapPixels];
  int count = 0;
  int64_t depth = 0;
  bool first = true;
  const auto multiply_them = [&] {
    for (int64_t p = 0; p < group.count; p += P) {
      tap_tile<S, L, V, P>(entries, count, x, p, sums + p * O, first);
    }
    count = 0;
    depth = 0;
    first = false;
  };
  for (int32_t i = t.starts[row]; i < t.starts[row + 1]; ++i) {
    const BlockRef ref = t.refs[i];
    const S gate = gate_of<C>(a, ref.weight);
    if (gate == S{0}) continue;
    const int64_t inputs = least<int64_t>(a.block, a.inputs - static_cast<int64_t>(ref.from) * a.block);
    const int64_t weight = ref.weight * t.taps, begin = ref.from * t.round * a.block;
    for (int64_t k = 0; k < inputs; k += kTapInputs) {
      const int64_t some = least<int64_t>(kTapInputs, inputs - k);
      const int64_t rows = (some + kSmallestBlock - 1) / kSmallestBlock * kSmallestBlock;  // that are copied
      for (int64_t tap = 0; tap < t.tap_count; ++tap) {
        if (count == kMost || depth + rows > kTapDepth) multiply_them();
        const Tap& at = t.tap[tap];
        const int64_t* pixels = group.at;
        if (t.sources != nullptr) {
          pixels = looked_up[count];
          if (!look_up(t, at.index, group, width, looked_up[count])) continue;
        }
        const S* w = copies + depth * O;
        if (t.weights != nullptr) {
          w = static_cast<const S*>(t.weights) + weight * a.block * a.block +
              (strip * t.taps + at.index * O) * a.block + k * O;
        } else {
          copy_gated<C, O>(a, weight + at.index, gate, strip, {k, k + rows}, copies + depth * O);
        }
        entries[count++] = {begin + k * t.round + at.shift * width, w, some, pixels};
        depth += rows;
      }
    }
  }
  if (count > 0 || first) multiply_them();
}

// Rows of sums to outputs that are anywhere.
template <class C>
void scatter_rows(const TapArgs& t, const ProductArgs& a, int64_t to, const TapGroup& group,
                  const typename C::S* rows) {
  using S = typename C::S;
  const int64_t first = to * a.block, features = least<int64_t>(a.block, a.outputs - first);
  for (int64_t i = 0; i < group.count; ++i) {
    auto* y = static_cast<typename C::T*>(a.y) + group.pixel[i];
    for (int64_t f = 0; f < features; ++f) {
      store_as<S, 1>(y + t.y_channels[first + f] * a.y_feature, Vec<S, 1>{rows[i * a.block + f]});
    }
  }
}

// Rows [pixels][strip] of sums, `a` taking a strip for a block, by runs of neighbours. Up to a vector of rows behind
// them is read.
template <class C, int O>
void finish_strip(const TapArgs& t, const ProductArgs& a, int64_t to, const TapGroup& group,
                  const typename C::S* sums) {
  constexpr int L = C::lanes, kSquare = least(least(L, O), kSmallestBlock);
  if (t.y_channels != nullptr) return scatter_rows<C>(t, a, to, group, sums);
  const bool by_feature = a.y_token == 1;
  const int64_t most = by_feature ? L : kTapPixels;
  for (int64_t i = 0; i < group.count;) {
    int64_t run = 1;
    while (run < most && i + run < group.count && group.pixel[i + run] == group.pixel[i] + run * a.y_token) ++run;
    ProductArgs b = a;
    b.y = static_cast<typename C::T*>(a.y) + group.pixel[i];
    if (a.residual != nullptr) b.residual = static_cast<const typename C::T*>(a.residual) + group.pixel[i];
    const typename C::S* rows = sums + i * a.block;
    if (by_feature) {
      alignas(64) typename C::S exchanged[L * kMaxBlock];
      exchange_sums<C, kSquare>(a, rows, exchanged);
      finish_by_feature<C>(b, Place<C>(b, to, 0), run, exchanged);
    } else {
      finish_tokens_by<C, least<int>(L, O)>(b, to, 0, run, rows);
    }
    i += run;
  }
}

template <class C>
void multiply_taps(const TapArgs& t, int64_t row, Range pixels) {
  using S = typename C::S;
  with_strip<C>(t.product.block, [&]<int L, int V>() {
    constexpr int O = L * V, P = kTapTile<C, V>;
    static_assert(kTapPixels % P == 0);
    alignas(64) S sums[(kTapPixels + C::lanes) * O];
    ProductArgs a = t.product;
    a.block = O;
    int64_t image = pixels.first / t.places, place = pixels.first % t.places;
    TapGroup group;
    for (int64_t first = pixels.first; first < pixels.last; first += kTapPixels) {
      group.count = least<int64_t>(kTapPixels, pixels.last - first);
      for (int64_t i = 0; i < group.count; ++i) {
        const int64_t width = least<int64_t>(t.product.block, kTapInputs), at = image * t.image;
        group.at[i] = t.sources == nullptr ? (at + t.positions[place]) * width : at;
        group.place[i] = place;
        group.pixel[i] = image * t.y_image + t.pixels[place] * a.y_token;
        if (++place == t.places) {
          place = 0;
          ++image;
        }
      }
      for (int64_t i = group.count; i % P != 0; ++i) group.at[i] = group.at[0];
      for (int strip = 0; strip < t.product.block; strip += O) {
        const int64_t to = row * (t.product.block / O) + strip / O;
        if (to * O >= a.outputs) break;
        sum_strip<C, L, V>(t, row, strip, group, sums);
        finish_strip<C, O>(t, a, to, group, sums);
      }
    }
  });
}

template <class C>
ProductKernel make_product_with_taps(Isa isa) {
  ProductKernel kernel = make_product<C>(isa);
  kernel.tap_group = kTapPixels;
  kernel.pack_tap_weights = pack_tap_weights<C>;
  kernel.multiply_taps = multiply_taps<C>;
  return kernel;
}

}  // namespace
}  // namespace blocksparse::linear
