// How the kernel `many` sees x and y.
#pragma once

#include "cuda/tensor_map.h"
#include "ops/linear/linear.h"
#include "ops/linear/select_many.h"

namespace blocksparse::linear {
namespace {

// Stored in boxes, and as it is. Of a row that ends within 16 bytes a box writes more than there is (seen on an H200).
inline bool is_plain(const Product& p) {
  return p.bias == nullptr && p.residual.data == nullptr && p.activation == Activation::none && !p.y.features_first() &&
         reinterpret_cast<uintptr_t>(p.y.data) % 16 == 0 && p.y.token_stride % 8 == 0 && p.y.features % 8 == 0;
}

inline Status make_many_maps(const Product& p, int32_t tokens, CUtensorMap& x, CUtensorMap& y) {
  BS_RETURN_IF_ERROR(cuda::make_tensor_map({.data = p.x.data,
                                            .columns = p.x.features,
                                            .rows = p.x.n,
                                            .row_stride = p.x.token_stride,
                                            .box_columns = kChunk,
                                            .box_rows = static_cast<uint32_t>(tokens)},
                                           x));
  if (!is_plain(p)) return {};
  return cuda::make_tensor_map({.data = p.y.data,
                                .columns = p.y.features,
                                .rows = p.y.n,
                                .row_stride = p.y.token_stride,
                                .box_columns = 64,
                                .box_rows = 64},
                               y);
}

}  // namespace
}  // namespace blocksparse::linear
