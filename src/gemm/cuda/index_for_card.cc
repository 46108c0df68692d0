// What the families of CUDA kernels need of a layout besides its tables. It is computed when the tables move to a card.
#include <algorithm>

#include "blocksparse/device_index.h"
#include "core/index.h"
#include "core/schedule.h"
#include "gemm/cuda/wgmma/strip_order.h"

namespace blocksparse {

std::vector<int32_t> index_for_card(const Layout& layout) {
  std::vector<int32_t> index(layout.index().begin(), layout.index().end());
  LayoutView view = layout.view();
  const Header h = header_of(view);
  const IndexSections at = index_sections(h.out_blocks, h.in_blocks, view.blocks);
  for (const bool by_in : {false, true}) {
    const RowWalk walk = walk_of(view, by_in);
    const int32_t columns = by_in ? h.out_blocks : h.in_blocks;
    const std::vector<int32_t> order = gemm::wgmma::order_strips(
        walk.starts, walk.refs, columns, by_in ? view.in_features : view.out_features, view.block_size);
    std::copy(order.begin(), order.end(), index.begin() + (by_in ? at.by_in : at.by_out).order);
    if (walk.splits.empty()) continue;
    auto* room = reinterpret_cast<uint16_t*>(index.data() + at.words) + (by_in ? schedule_numbers(h.out_blocks) : 0);
    const int64_t rows = by_in ? h.in_blocks : h.out_blocks;
    write_schedules(walk.starts, {room, static_cast<size_t>(schedule_numbers(rows))});
    reinterpret_cast<Header*>(index.data())->reserved[kScheduled] |= by_in ? 2 : 1;
  }
  return index;
}

}  // namespace blocksparse
