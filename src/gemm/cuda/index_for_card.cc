// What the families of CUDA kernels need of a layout besides its tables. It is computed when the tables move to a card.
#include <algorithm>

#include "blocksparse/device_index.h"
#include "core/index.h"
#include "gemm/cuda/wgmma/strip_order.h"

namespace blocksparse {

std::vector<int32_t> index_for_card(const Layout& layout) {
  std::vector<int32_t> index(layout.index().begin(), layout.index().end());
  LayoutView view = layout.view();
  const IndexSections at = index_sections(header_of(view).out_blocks, header_of(view).in_blocks, view.blocks);
  for (const bool by_in : {false, true}) {
    const RowWalk walk = walk_of(view, by_in);
    const int32_t columns = by_in ? header_of(view).out_blocks : header_of(view).in_blocks;
    const std::vector<int32_t> order = gemm::wgmma::order_strips(
        walk.starts, walk.refs, columns, by_in ? view.in_features : view.out_features, view.block_size);
    std::copy(order.begin(), order.end(), index.begin() + (by_in ? at.by_in : at.by_out).order);
  }
  return index;
}

}  // namespace blocksparse
