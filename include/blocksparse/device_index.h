// The tables of a layout on a CUDA card. The card makes them from a mask, without the host, for patterns that change
// while a network is trained; or the host makes them to be copied to the card.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "blocksparse/export.h"
#include "blocksparse/layout.h"
#include "blocksparse/status.h"
#include "blocksparse/stream.h"
#include "blocksparse/tensor.h"

namespace blocksparse {

//   mask   [out_blocks, in_blocks] bytes, row-major: a byte that is not 0 is a block
//   index  [device_index_words()]  int32, overwritten: what LayoutView::on_device() takes
// The mask must hold sizes.blocks blocks. A card cannot refuse another number: the tables then have no block at all
// (products are 0, dW is undefined), and layout_of_device_index() reports it. Every run gives the same bits. They are
// those of Layout::index(), except that the hash is 0 and that room for cut rows is always left. Uses
// device_index_workspace_size() bytes of `workspace`. Allocates nothing, may be captured. Queues on `stream` and
// returns.
[[nodiscard]] BS_EXPORT Status make_device_index(const uint8_t* mask, const LayoutView::Sizes& sizes,
                                                 std::span<int32_t> index, Device device, Workspace workspace,
                                                 Stream stream = {});
BS_EXPORT Result<int64_t> device_index_words(const LayoutView::Sizes& sizes);
// Bytes of workspace: see Workspace in stream.h. The sizes are the problem; `device` is a card.
BS_EXPORT size_t device_index_workspace_size(const LayoutView::Sizes& sizes, Device device);

// The tables of a layout as a card likes them best: Layout::index(), which works as well, and the order in which
// kernels for many tokens put strips of rows side by side so that they share inputs. The result is the same on every
// machine. The search takes some milliseconds for thousands of rows of blocks. May throw std::bad_alloc.
BS_EXPORT std::vector<int32_t> index_for_card(const Layout& layout);

// The layout of tables that a card made and that were copied to the host. Refused if the mask did not hold sizes.blocks
// blocks.
BS_EXPORT Result<Layout> layout_of_device_index(std::span<const int32_t> index);

}  // namespace blocksparse
