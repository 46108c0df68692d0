// How the kernel `wgmma` sees x and y: tensor maps, and copies through them.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/tensor_map.h"
#include "gemm/cuda/wgmma/images.cuh"
#include "gemm/cuda/wgmma/plan.h"
#include "gemm/product.h"

namespace blocksparse::gemm::wgmma {
namespace {

// The order of x: rows are tokens, rows are features, or x is gathered from images.
enum class XOrder { tokens, features, images };

template <XOrder>
struct XMap {
  CUtensorMap map;
};
template <>
struct XMap<XOrder::images> {
  CUtensorMap map;
  ImageSteps steps;
  TapSteps taps;
};

template <XOrder>
struct YMap {
  CUtensorMap map;
};
template <>
struct YMap<XOrder::images> {
  CUtensorMap map;
  ImageSteps steps;
  bool scattered;  // otherwise its rows are tokens
};

// Where x and y lie in space if x is gathered. y is given only if it is scattered.
struct Images {
  const GatheredImages* x = nullptr;
  const ScatteredImages* y = nullptr;
};

// Loads a stage's x: [tokens][64 inputs] or, features-first, [tokens / 64][64 inputs][64 tokens].
template <XOrder Order, int Tokens>
__device__ inline void load_x(uint32_t to, const XMap<Order>& x, uint32_t full, int input, int token) {
  if constexpr (Order == XOrder::features) {
#pragma unroll
    for (int i = 0; i < Tokens / 64; ++i) ptx::load_box(to + i * 64 * kChunk * 2, &x.map, full, token + 64 * i, input);
  } else if constexpr (Order == XOrder::images) {
    load_positions(to, &x.map, full, x.steps.deep, x.taps.tap_of(input), x.steps.pixel_of(token));
  } else {
    ptx::load_box(to, &x.map, full, input, token);
  }
}

// Whether boxes can store y. If a row ends within 16 bytes, a box writes beyond its end (seen on an H200).
inline bool in_boxes(const Activations& y) {
  const int64_t stride = y.features_first() ? y.feature_stride : y.token_stride;
  const int64_t length = y.features_first() ? y.n : y.features;
  return reinterpret_cast<uintptr_t>(y.data) % 16 == 0 && stride % 8 == 0 && stride >= length && length % 8 == 0;
}

inline bool is_plain(const Product& p) {
  return p.bias == nullptr && p.residual.data == nullptr && p.activation == Activation::none && !p.glu &&
         !p.y.features_first() && in_boxes(p.y);
}

// Boxes of 64 tokens x 64 outputs.
inline Status make_rows_map(const Activations& y, CUtensorMap& map) {
  if (!in_boxes(y)) return {};
  const bool first = y.features_first();
  return cuda::make_tensor_map({.data = y.data,
                                .columns = first ? y.n : y.features,
                                .rows = first ? y.features : y.n,
                                .row_stride = first ? y.feature_stride : y.token_stride,
                                .box_columns = 64,
                                .box_rows = 64},
                               map);
}

template <XOrder Order>
Status make_y_map(const Activations& y, const Images& images, YMap<Order>& to) {
  if constexpr (Order == XOrder::images) {
    to.scattered = images.y != nullptr;
    if (to.scattered) {
      const bool deep = images.x->deep() || images.y->size[2] != 1;
      to.steps = ImageSteps(*images.y, deep);
      return cuda::make_image_map(boxed(*images.y, deep, 64, 64), to.map);
    }
  }
  return make_rows_map(y, to.map);
}

template <XOrder Order>
__device__ inline void store_y(const YMap<Order>& y, uint32_t box, int output, int token, bool rows_are_outputs) {
  if constexpr (Order == XOrder::images) {
    if (y.scattered) {
      store_positions(&y.map, box, y.steps.deep, output, y.steps.pixel_of(token));
      return;
    }
  }
  ptx::store_box(&y.map, box, rows_are_outputs ? token : output, rows_are_outputs ? output : token);
}

// Boxes of a chunk x `tokens` or, features-first, of 64 tokens x a chunk.
template <XOrder Order>
Status make_x_map(const Activations& x, const Images& images, int32_t tokens, XMap<Order>& to) {
  if constexpr (Order == XOrder::images) {
    to.steps = ImageSteps(*images.x, images.x->deep());
    to.taps = TapSteps(*images.x);
    return cuda::make_image_map(boxed(*images.x, images.x->deep(), kChunk, static_cast<uint32_t>(tokens)), to.map);
  } else {
    const bool first = Order == XOrder::features;
    return cuda::make_tensor_map({.data = x.data,
                                  .columns = first ? x.n : x.features,
                                  .rows = first ? x.features : x.n,
                                  .row_stride = first ? x.feature_stride : x.token_stride,
                                  .box_columns = 64,
                                  .box_rows = static_cast<uint32_t>(first ? kChunk : tokens)},
                                 to.map);
  }
}

}  // namespace
}  // namespace blocksparse::gemm::wgmma
