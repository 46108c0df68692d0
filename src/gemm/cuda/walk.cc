#include "gemm/cuda/walk.h"

#include <cstddef>

#include "core/ceil_div.h"
#include "core/index.h"

namespace blocksparse::gemm {

DeviceWalk walk_on_device(const LayoutView& layout, bool by_in) {
  const int64_t b = layout.block_size;
  const IndexSections s =
      index_sections(ceil_div(layout.out_features, b), ceil_div(layout.in_features, b), layout.blocks);
  const auto& at = by_in ? s.by_in : s.by_out;
  const int32_t* index = layout.index;
  const size_t counts = by_in ? offsetof(Header, by_in) : offsetof(Header, by_out);
  return {.counts = index + counts / sizeof(int32_t),
          .starts = index + at.starts,
          .refs = reinterpret_cast<const BlockRef*>(index + at.refs),
          .pieces = reinterpret_cast<const Piece*>(index + at.pieces),
          .splits = reinterpret_cast<const Split*>(index + at.splits),
          .order = index + at.order};
}

const int32_t* out_of_on_device(const LayoutView& layout) {
  const int64_t b = layout.block_size;
  return layout.index +
         index_sections(ceil_div(layout.out_features, b), ceil_div(layout.in_features, b), layout.blocks).out_of;
}

}  // namespace blocksparse::gemm
