// Convolutions by the product's main loop: a tap is the same panel, read at another position.
//   x panels [images][channels][positions]: channels-first grids with zeros around the image, so that no tap leaves
//   them sums [vectors][b][lanes] as in cpu_product.h; a vector is `lanes` positions side by side, wherever it begins.
//   Some of them may be no pixel of y: what lies between the rows of the grid.
// Who does what
//   pack      some channels of one image
//   multiply  one row of blocks for some vectors: for each group of them, for each kTapDepth inputs of all blocks and
//             taps: every strip of W, as in cpu_product.h; then finish by runs of pixels
#pragma once

#include "ops/linear/cpu_product.h"

namespace blocksparse::linear {
namespace {

constexpr int kTapDepth = 256;  // inputs of a chunk: sums go through L1 once a chunk

// Vectors of a group: whole tiles.
template <class C>
constexpr int kTapGroup = (C::group + C::tile.vectors - 1) / C::tile.vectors * C::tile.vectors;

// Zeros at [begin, end) of each channel's row, and up to a vector less one behind them. A call of memset for each of
// these short runs took as long as packing what is between them.
template <class C>
void fill_zeros(typename C::S* to, int64_t channel, int64_t channels, int64_t begin, int64_t end) {
  using S = typename C::S;
  constexpr int L = C::lanes;
  for (int64_t i = begin; i < end; i += L) {
    for (int64_t c = 0; c < channels; ++c) store_as<S, L>(to + c * channel + i, Vec<S, L>{});
  }
}

// The positions of an axis that are pixels.
inline Range inside(const TapPack& p, int axis) {
  const int64_t first = p.first[axis], step = p.step[axis];
  const int64_t begin = first >= 0 ? 0 : (-first + step - 1) / step;
  const int64_t end = p.size[axis] <= first ? 0 : (p.size[axis] - first + step - 1) / step;
  return {least(begin, p.count[axis]), least(end, p.count[axis])};
}

// Pixels `from`, `stride` apart, of channels that lie side by side. Up to a vector less one behind the run is zeroed.
template <class C>
void pack_taps_transposed(const typename C::T* from, int64_t stride, int64_t pixels, int64_t channels,
                          typename C::S* to, int64_t channel) {
  constexpr int Q = C::lanes < 8 ? C::lanes : 8;
  for (int64_t i = 0; i < pixels; i += Q) {
    pack_transposed<typename C::S, Q>(from + i * stride, stride, pixels - i, channels, to + i, channel);
  }
}

// Pixels of one channel.
template <class C>
void pack_taps_run(const typename C::T* from, int64_t stride, int64_t pixels, typename C::S* to) {
  using S = typename C::S;
  if (stride == 1) {
    constexpr int L = C::lanes;
    int64_t i = 0;
    for (; i + L <= pixels; i += L) store_as<S, L>(to + i, load_as<S, L>(from + i));
    for (; i < pixels; ++i) to[i] = load_as<S, 1>(from + i)[0];
    return;
  }
  for (int64_t i = 0; i < pixels; ++i) to[i] = load_as<S, 1>(from + i * stride)[0];
}

// One row of the grid.
template <class C>
void pack_taps_row(const TapPack& p, const typename C::T* from, Range run, int64_t first, int64_t last,
                   typename C::S* to) {
  const int64_t pixels = run.last - run.first, stride = p.step[2] * p.x_pixel;
  for (int64_t c = first; c < last;) {
    int64_t end = c + 1;
    const int64_t source = p.order == nullptr ? c : p.order[c];
    if (p.x_channel == 1) {
      while (end < last && (p.order == nullptr || p.order[end] == source + (end - c))) ++end;
    }
    typename C::S* row = to + c * p.channel + run.first;
    if (end - c > 1) pack_taps_transposed<C>(from + source, stride, pixels, end - c, row, p.channel);
    else pack_taps_run<C>(from + source * p.x_channel, stride, pixels, row);
    c = end;
  }
}

// Rows in rising order, for packing a row may zero what follows.
template <class C>
void pack_taps(const TapPack& p, int64_t first, int64_t last) {
  using S = typename C::S;
  const Range z_run = inside(p, 0), y_run = inside(p, 1), x_run = inside(p, 2);
  auto* panel = static_cast<S*>(p.panel);
  for (int64_t z = 0; z < p.count[0]; ++z) {
    for (int64_t y = 0; y < p.count[1]; ++y) {
      S* to = panel + z * p.plane + y * p.row;
      const bool exists = z >= z_run.first && z < z_run.last && y >= y_run.first && y < y_run.last;
      const Range run = exists && x_run.first < x_run.last ? x_run : Range{0, 0};
      S* row = to + first * p.channel;
      fill_zeros<C>(row, p.channel, last - first, 0, run.first);
      if (run.first < run.last) {
        const int64_t iz = p.first[0] + z * p.step[0], iy = p.first[1] + y * p.step[1];
        const int64_t ix = p.first[2] + run.first * p.step[2];
        const auto* from =
            static_cast<const typename C::T*>(p.x) + ((iz * p.size[1] + iy) * p.size[2] + ix) * p.x_pixel;
        pack_taps_row<C>(p, from, run, first, last, to);
      }
      fill_zeros<C>(row, p.channel, last - first, run.last, p.count[2]);
    }
  }
}

// sums [b][lanes] as rows [lanes][b].
template <class C, int W>
void rows_of_sums(const ProductArgs& a, const typename C::S* sums, typename C::S* rows) {
  for (int64_t t = 0; t < C::lanes; t += W) {
    for (int64_t f = 0; f < a.block; f += W) {
      pack_transposed<typename C::S, W>(sums + f * C::lanes + t, C::lanes, W, W, rows + t * a.block + f, a.block);
    }
  }
}

// Rows of sums to outputs that are anywhere.
template <class C>
void scatter_rows(const TapArgs& t, const ProductArgs& a, int64_t row, const int64_t* pixels,
                  const typename C::S* rows) {
  using S = typename C::S;
  const int64_t first = row * a.block, features = least<int64_t>(a.block, a.outputs - first);
  for (int lane = 0; lane < C::lanes; ++lane) {
    if (pixels[lane] < 0) continue;
    auto* y = static_cast<typename C::T*>(a.y) + pixels[lane] * a.y_token;
    for (int64_t f = 0; f < features; ++f) {
      store_as<S, 1>(y + t.y_channels[first + f] * a.y_feature, Vec<S, 1>{rows[lane * a.block + f]});
    }
  }
}

// Sums [b][lanes] of one vector to its pixels, by runs of neighbours. Up to a vector behind the sums is read.
template <class C, int W>
void finish_pixels_by(const TapArgs& t, const ProductArgs& a, int64_t row, const int64_t* pixels,
                      const typename C::S* sums) {
  constexpr int L = C::lanes;
  const bool by_feature = a.y_token == 1 && t.y_channels == nullptr;
  const auto run_at = [&](int lane) {
    int end = lane + 1;
    while (end < L && pixels[end] == pixels[lane] + (end - lane)) ++end;
    return end - lane;
  };
  if (!by_feature && t.y_channels == nullptr && pixels[0] >= 0 && run_at(0) == L) {
    return finish_by_token<C, W>(a, row, pixels[0], L, sums);
  }
  alignas(64) typename C::S rows[L * kMaxBlock];
  if (!by_feature) rows_of_sums<C, W>(a, sums, rows);
  if (t.y_channels != nullptr) return scatter_rows<C>(t, a, row, pixels, rows);
  for (int lane = 0; lane < L;) {
    if (pixels[lane] < 0) {
      ++lane;
      continue;
    }
    const int run = run_at(lane);
    if (by_feature) finish_by_feature<C>(a, Place<C>(a, row, pixels[lane]), run, sums + lane);
    else finish_tokens_by<C, W>(a, row, pixels[lane], run, rows + lane * a.block);
    lane += run;
  }
}

template <class C>
void finish_pixels(const TapArgs& t, const ProductArgs& a, int64_t row, const int64_t* pixels,
                   const typename C::S* sums) {
  if (C::lanes > kSmallestBlock && a.block < C::lanes) finish_pixels_by<C, kSmallestBlock>(t, a, row, pixels, sums);
  else finish_pixels_by<C, C::lanes>(t, a, row, pixels, sums);
}

// sums [vectors][b][lanes] of one group.
template <class C>
void sum_taps(const TapArgs& t, int64_t row, const int64_t* at, int vectors, typename C::S* sums) {
  using S = typename C::S;
  const ProductArgs& a = t.product;
  const XView<S> x{static_cast<const S*>(t.panels), t.channel, at};
  constexpr int kMost = kTapDepth / kSmallestBlock;
  Entry entries[kMost];
  const int most = kTapDepth / a.block;
  int count = 0;
  bool first = true;
  const auto multiply_them = [&] {
    multiply_entries<C, kTapDepth>(
        a, {entries, count}, x, vectors, sums, first, [](int) {},
        [&](int i, int strip, S* to) __attribute__((always_inline)) {
          copy_gated<C, C::tile.outputs>(a, entries[i].weight, gate_of<C>(a, entries[i].gate), strip, to);
        });
    count = 0;
    first = false;
  };
  for (int32_t i = t.starts[row]; i < t.starts[row + 1]; ++i) {
    const BlockRef ref = t.refs[i];
    if (a.gates != nullptr && gate_of<C>(a, ref.weight) == S{0}) continue;
    const int64_t begin = static_cast<int64_t>(ref.from) * a.block;
    const auto depth = static_cast<int32_t>(least<int64_t>(a.block, a.inputs - begin));
    for (int64_t tap = 0; tap < t.tap_count; ++tap) {
      if (count == most) multiply_them();
      entries[count++] = {begin * t.channel + t.tap[tap].shift, ref.weight * t.taps + t.tap[tap].index, depth,
                          ref.weight};
    }
  }
  if (count > 0 || first) multiply_them();
}

template <class C>
void multiply_taps(const TapArgs& t, int64_t row, Range vectors) {
  using S = typename C::S;
  constexpr int L = C::lanes, kGroup = kTapGroup<C>;
  alignas(64) S sums[kGroup * kMaxBlock * L + L];
  for (int64_t v = vectors.first; v < vectors.last;) {
    const int64_t left = vectors.last - v;
    // Never a single vector by itself: its sums would wait for one another.
    const int count = static_cast<int>(left == kGroup + 1 ? kGroup - C::tile.vectors : least<int64_t>(kGroup, left));
    int64_t at[kGroup];
    for (int i = 0; i < count; ++i) at[i] = (v + i) / t.vectors * t.image + t.first[(v + i) % t.vectors];
    sum_taps<C>(t, row, at, count, sums);
    for (int i = 0; i < count; ++i) {
      const int64_t image = (v + i) / t.vectors, vector = (v + i) % t.vectors;
      ProductArgs a = t.product;
      a.y = static_cast<typename C::T*>(a.y) + image * t.y_image;
      if (a.residual != nullptr) a.residual = static_cast<const typename C::T*>(a.residual) + image * t.y_image;
      finish_pixels<C>(t, a, row, t.pixels + vector * L, sums + static_cast<int64_t>(i) * a.block * L);
    }
    v += count;
  }
}

template <class C>
ProductKernel make_product_with_taps(Isa isa) {
  ProductKernel kernel = make_product<C>(isa);
  kernel.tap_group = kTapGroup<C>;
  kernel.pack_taps = pack_taps<C>;
  kernel.multiply_taps = multiply_taps<C>;
  return kernel;
}

}  // namespace
}  // namespace blocksparse::linear
