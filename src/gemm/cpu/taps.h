// Convolutions: the second loop for products. Outputs are the vector dimension, pixels are broadcast.
//   x panels [in blocks][round][b], with blocks of at most kTapInputs inputs: grids of positions with zeros around the
//   images, so that no tap leaves a grid. A tap reads x some positions further
//   W as strips [blocks][strips][taps][b inputs][strip of outputs], copied once a call
//   sums [pixels][strip]
// x is packed without a transpose, y is stored without one, and no lane holds anything but a pixel. The loop reads
// whole lines of x and W in the order of use. Who does what
//   pack_tap_weights  some blocks of W, widened and gated
//   multiply_taps     rows of blocks for some pixels: for each group of pixels, for each row, for each strip:
//                       for each kTapDepth inputs of all blocks and taps: W stays in L1
//                         for each tile of pixels: sums in registers
//                       then finish by runs of pixels
#pragma once

#include "core/ceil_div.h"
#include "gemm/cpu/product.h"

namespace blocksparse::gemm {
namespace {

constexpr int kTapDepth = 288;                             // inputs of a chunk
constexpr int kTapPixels = kVectorBytes == 64 ? 112 : 96;  // pixels of a group: whole tiles of any width, whole rows
constexpr int kMostTapTile = 8;
constexpr int kTapPlaces = kTapPixels + kMostTapTile;  // the last tile may begin anywhere

// Calls body.operator()<L, V>(): a strip is V vectors of L outputs, one vector for small blocks.
template <class C, class Body>
auto with_strip(int block, Body body) {
  constexpr int L = C::lanes;
  if (block >= 2 * L) return body.template operator()<L, 2>();
  if constexpr (L > kSmallestBlock) {
    if (block < L) return body.template operator()<kSmallestBlock, 1>();
  }
  return body.template operator()<L, 1>();
}

// Pixels of a tile: as many sums as the product's tile has, but no more addresses than registers.
template <class C, int V>
constexpr int kTapTile = least(C::tile.outputs * C::tile.vectors / V, kMostTapTile);

// Whether three neighbouring taps are done together. One vector of outputs needs 9 loads for 8 products otherwise. Zen
// 5, 28 x 28, 3 x 3, b = 16, 50 %: 64 % of peak -> 75. Zen 3, b = 8, 25 %: 52 % -> 74.
//
// Computing the zeros between rows as well, for more tiles of neighbours, was slower on Zen 5 (72 %) and was not kept.
template <int V>
constexpr bool kThreeTaps = kVectorBytes >= 32 && V == 1;
// The number of pixels of a tile whose pixels are neighbours, given how many there are; 0: too few. One address serves
// all of them, and sums fill the registers. A tile is a whole row where possible. Xeon, AVX-512, 28 x 28, 3 x 3, b =
// 16: 71 % of peak with 12 pixels, 76 % with whole rows. Zen 3, three taps, b = 8: 9 and 10 pixels are 4 to 8 % slower
// than 12.
template <int V>
constexpr int row_tile(int neighbours) {
  if (kVectorBytes < 64) return kThreeTaps<V> && neighbours >= 12 ? 12 : 0;
  for (int tile : {14, 16, 12}) {
    if (neighbours % tile == 0 && tile * V <= 28) return tile;
  }
  if (neighbours > 16 && V == 1) return 16;
  return neighbours > 14 ? 14 : neighbours > 12 ? 12 : 0;
}

// Some inputs of one block at one tap, or at three taps that each read x one position further.
template <class S>
struct TapEntry {
  int64_t x;   // offset of the first input
  const S* w;  // [inputs][strip]
  int64_t depth;
  const int64_t* at;  // offset of each pixel of the group
  int64_t next_w;     // distance in w from one tap to the next; 0: a single tap
};

// Adds one input of an entry, tap after tap: sum[p] += x(p, k) W(k). Pixel p is at xb + from[p], W at wb.
template <class S, int L, int V, int P>
BS_INLINE void add_taps(Vec<S, L> (&sum)[P][V], const S* xb, const int64_t* from, const S* wb, int taps, int64_t next_w,
                        int64_t next_x) {
  for (int tap = 0; tap < taps; ++tap, xb += next_x, wb += next_w) {
    Vec<S, L> wv[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) wv[v] = in_register(operand<S, L>(wb + v * L));
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) {
      const Vec<S, L> xv = in_register(operand_in_all_lanes<S, L>(xb + from[p]));
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) add_product<S, L>(sum[p][v], xv, wv[v]);
    }
  }
}

// add_taps for three taps and neighbouring pixels, in the order of add_taps. Each element of x is loaded once.
template <class S, int L, int P>
BS_INLINE void add_three_taps(Vec<S, L> (&sum)[P][1], const S* xb, const S* wb, int64_t next_w) {
  Vec<S, L> wv[3];
#pragma GCC unroll 3
  for (int tap = 0; tap < 3; ++tap) wv[tap] = in_register(operand<S, L>(wb + tap * next_w));
#pragma GCC unroll 18
  for (int q = 0; q < P + 2; ++q) {
    const Vec<S, L> xv = in_register(operand_in_all_lanes<S, L>(xb + q * L));
#pragma GCC unroll 3
    for (int tap = 0; tap < 3; ++tap) {
      if (q >= tap && q - tap < P) add_product<S, L>(sum[q - tap][0], xv, wv[tap]);
    }
  }
}

// The inner loop: sums [P][V vectors] (+)= x [P pixels from `pixel` on, inputs of the entries] W [inputs, strip].
//   kRow  the pixels are neighbours in a panel whose rows are a strip wide
template <class S, int L, int V, int P, bool kRow>
__attribute__((noinline)) void tap_tile(const TapEntry<S>* entries, int count, const S* x, int64_t pixel, S* sums,
                                        bool first) {
  Vec<S, L> sum[P][V];
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[p][v] = kAddsLast || first ? Vec<S, L>{} : load_as<S, L>(sums + (p * V + v) * L);
  }
  for (const TapEntry<S>* e = entries; e != entries + count; ++e) {
    const S *xb = x + e->x, *wb = e->w;
    int64_t from[P];
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) from[p] = kRow ? p * L * V : e->at[pixel + p];
    if constexpr (kRow) xb += e->at[pixel];
    auto many = [&](auto step) __attribute__((always_inline)) {
      auto both = [&]() __attribute__((always_inline)) {
        step();
        wb = next_row(wb + V * L);
        xb = next_row(xb + 1);
      };
      int64_t k = e->depth;
      for (; k >= kUnroll; k -= kUnroll) {
#pragma GCC unroll 8
        for (int u = 0; u < kUnroll; ++u) both();
      }
      for (; k > 0; --k) both();
    };
    if constexpr (kThreeTaps<V>) {
      if (e->next_w != 0) {
        many([&]() __attribute__((always_inline)) {
          if constexpr (kRow) add_three_taps<S, L, P>(sum, xb, wb, e->next_w);
          else add_taps<S, L, V, P>(sum, xb, from, wb, 3, e->next_w, L);
        });
        continue;
      }
    }
    many([&]() __attribute__((always_inline)) { add_taps<S, L, V, P>(sum, xb, from, wb, 1, 0, 0); });
  }
  const bool adds = kAddsLast && !first;
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      if (adds) sum[p][v] += load_as<S, L>(sums + (p * V + v) * L);
      store_as<S, L>(sums + (p * V + v) * L, sum[p][v]);
    }
  }
}

// Some pixels, whose images and places have been looked up.
struct TapGroup {
  int64_t count;
  int64_t at[kTapPlaces];      // offset in a panel, for whole tiles; with `sources`, position of the image
  int neighbours[kTapPixels];  // number of neighbours in the panel, from each pixel on
  int64_t place[kTapPixels];
  int64_t pixel[kTapPixels];  // offset in y, in elements from the first image
};

// All pixels of a group, in whole tiles. in_grid: all entries find the pixels at group.at, where some are neighbours.
template <class S, int L, int V, int P>
void tap_tiles(const TapEntry<S>* entries, int count, const S* x, const TapGroup& group, bool in_grid, S* sums,
               bool first) {
  for (int64_t p = 0; p < group.count;) {
    S* of_tile = sums + p * V * L;
    const auto row = [&]<int R>() {
      tap_tile<S, L, V, R, true>(entries, count, x, p, of_tile, first);
      p += R;
    };
    const int together = in_grid && count > 0 ? row_tile<V>(group.neighbours[p]) : 0;
    if constexpr (kVectorBytes == 64) {
      if (together == 14) row.template operator()<14>();
      if constexpr (V == 1) {
        if (together == 16) row.template operator()<16>();
      }
    }
    if constexpr (kVectorBytes == 64 || kThreeTaps<V>) {
      if (together == 12) row.template operator()<12>();
    }
    if (together > 0) continue;
    tap_tile<S, L, V, P, false>(entries, count, x, p, of_tile, first);
    p += P;
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

// Looks up where one tap finds the pixels. Returns whether it finds any.
inline bool look_up(const TapArgs& t, int64_t tap, const TapGroup& group, int64_t width, int64_t* at) {
  const int64_t* source = t.sources + tap * t.places;
  bool any = false;
  for (int64_t i = 0; i < group.count; ++i) {
    const int64_t from = source[group.place[i]];
    at[i] = (from < 0 ? t.nothing : group.at[i] + from) * width;
    any = any || from >= 0;
  }
  for (int64_t i = group.count; i < kTapPlaces; ++i) at[i] = t.nothing * width;
  return any;
}

// 1 or -1 if this tap and the next two read neighbouring positions and are evenly spaced in W, otherwise 0.
inline int64_t step_of_three(const TapArgs& t, int64_t tap) {
  if (t.sources != nullptr || tap + 3 > t.tap_count) return 0;
  const Tap* at = t.tap + tap;
  const int64_t step = at[1].shift - at[0].shift, index = at[1].index - at[0].index;
  const bool even = at[2].shift - at[1].shift == step && at[2].index - at[1].index == index;
  return even && (step == 1 || step == -1) ? step : 0;
}

// Sums of one strip of a group. If W has not been copied for the call, each chunk is copied here.
template <class C, int L, int V>
void sum_strip(const TapArgs& t, int64_t row, int strip, const TapGroup& group, typename C::S* sums) {
  using S = typename C::S;
  constexpr int O = L * V, P = kTapTile<C, V>, kMost = kTapDepth / kSmallestBlock;
  const ProductArgs& a = t.product;
  const int64_t width = least<int64_t>(a.block, kTapInputs);
  const auto* x = static_cast<const S*>(t.panels);
  TapEntry<S> entries[kMost];
  alignas(64) S copies[kTapDepth * O];
  int64_t looked_up[kMost][kTapPlaces];
  int count = 0;
  int64_t depth = 0;
  bool first = true;
  const auto multiply_them = [&] {
    tap_tiles<S, L, V, P>(entries, count, x, group, t.sources == nullptr, sums, first);
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
      const int64_t rows = round_up(some, kSmallestBlock);  // rows of W that are copied
      for (int64_t tap = 0, together = 1; tap < t.tap_count; tap += together) {
        const Tap& at = t.tap[tap];
        const int64_t step = kThreeTaps<V> ? step_of_three(t, tap) : 0;
        together = step == 0 ? 1 : 3;
        if (count == kMost || depth + together * rows > kTapDepth) multiply_them();
        const int64_t* pixels = group.at;
        if (t.sources != nullptr) {
          pixels = looked_up[count];
          if (!look_up(t, at.index, group, width, looked_up[count])) continue;
        }
        const S* w = copies + depth * O;
        int64_t next_w = rows * O;
        if (t.weights != nullptr) {
          w = static_cast<const S*>(t.weights) + weight * a.block * a.block +
              (strip * t.taps + at.index * O) * a.block + k * O;
          next_w = (t.tap[tap + together - 1].index - at.index) / 2 * O * a.block;
        } else {
          for (int64_t i = 0; i < together; ++i) {
            copy_gated<C, O>(a, weight + t.tap[tap + i].index, gate, strip, {k, k + rows},
                             copies + (depth + i * rows) * O);
          }
        }
        const int64_t lowest = step < 0 ? 2 : 0;  // the tap of the three that reads x first
        entries[count++] = {begin + k * t.round + t.tap[tap + lowest].shift * width, w + lowest * next_w, some, pixels,
                            step * next_w};
        depth += together * rows;
      }
    }
  }
  if (count > 0 || first) multiply_them();
}

// Writes rows of sums to outputs that may be anywhere in y.
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

// Finishes rows [pixels][strip] of sums by runs of neighbouring pixels; `a` treats a strip as a block. Reads up to a
// vector of rows beyond the last pixel.
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

// Looks up where some pixels are. Pixels count as neighbours if they are `strip` apart, which is so where a panel's
// rows are as wide as a strip.
inline TapGroup look_up_pixels(const TapArgs& t, Range pixels, int64_t strip) {
  const int64_t width = least<int64_t>(t.product.block, kTapInputs);
  TapGroup group;
  group.count = pixels.last - pixels.first;
  int64_t image = pixels.first / t.places, place = pixels.first % t.places;
  for (int64_t i = 0; i < group.count; ++i) {
    const int64_t at = image * t.image;
    group.at[i] = t.sources == nullptr ? (at + t.positions[place]) * width : at;
    group.place[i] = place;
    group.pixel[i] = image * t.y_image + t.pixels[place] * t.product.y_token;
    if (++place == t.places) {
      place = 0;
      ++image;
    }
  }
  for (int64_t i = group.count; i < kTapPlaces; ++i) group.at[i] = group.at[0];
  for (int64_t i = group.count - 1, run = 0; i >= 0; --i) {
    run = i + 1 < group.count && group.at[i + 1] - group.at[i] == strip ? run + 1 : 1;
    group.neighbours[i] = static_cast<int>(run);
  }
  return group;
}

// Pixels are looked up once for all rows.
template <class C>
void multiply_taps(const TapArgs& t, Range rows, Range pixels) {
  using S = typename C::S;
  with_strip<C>(t.product.block, [&]<int L, int V>() {
    constexpr int O = L * V, P = kTapTile<C, V>;
    static_assert(kTapPixels % P == 0);
    alignas(64) S sums[(kTapPlaces + C::lanes) * O];
    ProductArgs a = t.product;
    a.block = O;
    for (int64_t first = pixels.first; first < pixels.last; first += kTapPixels) {
      const Range some{first, least<int64_t>(first + kTapPixels, pixels.last)};
      const TapGroup group = look_up_pixels(t, some, O);
      for (int64_t row = rows.first; row < rows.last; ++row) {
        for (int strip = 0; strip < t.product.block; strip += O) {
          const int64_t to = row * (t.product.block / O) + strip / O;
          if (to * O >= a.outputs) break;
          sum_strip<C, L, V>(t, row, strip, group, sums);
          finish_strip<C, O>(t, a, to, group, sums);
        }
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
}  // namespace blocksparse::gemm
