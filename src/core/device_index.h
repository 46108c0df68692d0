// Tables of a layout that a card makes itself from a mask: see make_device_index() in layout.h.
#pragma once

#include <cstdint>

#include "blocksparse/device_index.h"
#include "core/index.h"

namespace blocksparse {

// Words of Header::reserved: whether the mask held another number of blocks, and how many.
inline constexpr int kWrongBlocks = 0, kFoundBlocks = 1;

// One direction: rows of W, or its columns.
struct DeviceIndexSide {
  int32_t rows = 0, words = 0;  // and the words of 32 bits that a row of the mask is packed into
  // In the index; each ends where the next begins.
  int64_t starts = 0, refs = 0, pieces = 0, splits = 0, order = 0, end = 0;
  int64_t bits = 0, before = 0;  // in the workspace: [rows][words], and blocks of the row before each word
  int64_t counts = 0, keys = 0, unsorted = 0;  // [rows], of pieces [rows + kMaxSlots], Piece [rows + kMaxSlots]
  int32_t cap = 0, most_slices = 0;            // split_cap(), most_slices()
};

// All offsets are in words of 32 bits.
struct DeviceIndexPlan {
  Header header;  // but for the counts
  DeviceIndexSide by_out, by_in;
  int64_t out_of = 0, words = 0, workspace_words = 0;
};

Result<DeviceIndexPlan> plan_device_index(const LayoutView::Sizes& sizes);

// The plan of a call whose arguments have been checked.
Result<DeviceIndexPlan> check_device_index(const uint8_t* mask, const LayoutView::Sizes& sizes,
                                           std::span<const int32_t> index, Device device, Workspace workspace);

}  // namespace blocksparse
