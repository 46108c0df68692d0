// How the kernel `many` sees x and y.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/tensor_map.h"
#include "ops/linear/linear.h"
#include "ops/linear/select_many.h"

namespace blocksparse::linear {
namespace {

// Of a stage's x: [tokens][64 inputs], or features-first [tokens / 64][64 inputs][64 tokens].
template <bool First, int Tokens>
__device__ inline void load_many_x(uint32_t to, const CUtensorMap* map, uint32_t full, int input, int token) {
  if constexpr (First) {
#pragma unroll
    for (int i = 0; i < Tokens / 64; ++i) ptx::load_box(to + i * 64 * kChunk * 2, map, full, token + 64 * i, input);
  } else {
    ptx::load_box(to, map, full, input, token);
  }
}

// Of a row that ends within 16 bytes a box writes more than there is (seen on an H200).
inline bool in_boxes(const Activations& y) {
  const int64_t stride = y.features_first() ? y.feature_stride : y.token_stride;
  const int64_t length = y.features_first() ? y.n : y.features;
  return reinterpret_cast<uintptr_t>(y.data) % 16 == 0 && stride % 8 == 0 && stride >= length && length % 8 == 0;
}

inline bool is_plain(const Product& p) {
  return p.bias == nullptr && p.residual.data == nullptr && p.activation == Activation::none && !p.y.features_first() &&
         in_boxes(p.y);
}

// x comes in boxes of a chunk x `tokens`, or features-first of 64 tokens x a chunk.
inline Status make_many_maps(const Product& p, int32_t tokens, CUtensorMap& x, CUtensorMap& y) {
  const bool first = p.x.features_first();
  BS_RETURN_IF_ERROR(cuda::make_tensor_map({.data = p.x.data,
                                            .columns = first ? p.x.n : p.x.features,
                                            .rows = first ? p.x.features : p.x.n,
                                            .row_stride = first ? p.x.feature_stride : p.x.token_stride,
                                            .box_columns = 64,
                                            .box_rows = static_cast<uint32_t>(first ? kChunk : tokens)},
                                           x));
  if (!in_boxes(p.y)) return {};
  const bool y_first = p.y.features_first();
  return cuda::make_tensor_map({.data = p.y.data,
                                .columns = y_first ? p.y.n : p.y.features,
                                .rows = y_first ? p.y.features : p.y.n,
                                .row_stride = y_first ? p.y.feature_stride : p.y.token_stride,
                                .box_columns = 64,
                                .box_rows = 64},
                               y);
}

}  // namespace
}  // namespace blocksparse::linear
