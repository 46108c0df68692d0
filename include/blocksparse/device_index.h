// The tables of a layout on a CUDA card: made there from a mask, without a look from the host, for patterns that change
// while a network is trained; or by the host, to be copied there.
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

//   mask   [out_blocks, in_blocks] bytes, row-major: there is a block where one is not 0
//   index  [device_index_words()]  int32, overwritten: what LayoutView::on_device() takes
// The mask has to hold sizes.blocks blocks; a card cannot refuse another number, so the tables then have no block at
// all (products are 0, dW means nothing), and layout_of_device_index() says so. Same bits on every run, those of
// Layout::index() but for the hash, which is 0, and for room that is always left for cut rows. Uses
// device_index_workspace_size() bytes of `workspace`. Allocates nothing, may be captured. Queues on `stream` and
// returns.
[[nodiscard]] BS_EXPORT Status make_device_index(const uint8_t* mask, const LayoutView::Sizes& sizes,
                                                 std::span<int32_t> index, Device device, Workspace workspace,
                                                 Stream stream = {});
BS_EXPORT Result<int64_t> device_index_words(const LayoutView::Sizes& sizes);
// Bytes of workspace: see Workspace in stream.h, with the sizes as the problem. `device` is a card.
BS_EXPORT size_t device_index_workspace_size(const LayoutView::Sizes& sizes, Device device);

// The tables of a layout as they are best copied to a card: Layout::index(), which will do as well, and in which order
// kernels for many tokens multiply strips of rows side by side, so that they share inputs. The same on every machine.
// To search for that order takes some milliseconds for thousands of rows of blocks. May throw std::bad_alloc.
BS_EXPORT std::vector<int32_t> index_for_card(const Layout& layout);

// The layout of tables that a card made, copied to the host. Refused if the mask did not hold as many blocks as it
// should.
BS_EXPORT Result<Layout> layout_of_device_index(std::span<const int32_t> index);

}  // namespace blocksparse
