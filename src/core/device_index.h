// Plans the tables that a card makes from a mask: see make_device_index() in blocksparse/device_index.h.
#pragma once

#include <cstdint>

#include "blocksparse/device_index.h"
#include "core/index.h"

namespace blocksparse {

// Words of Header::reserved: 1 if the mask holds another number of blocks than announced, and the number that it holds.
// The next word is kScheduled of schedule.h.
inline constexpr int kWrongBlocks = 0, kFoundBlocks = 1;

// One direction: the rows of W or its columns.
struct DeviceIndexSide {
  int32_t rows = 0, words = 0;  // words: 32-bit words that a row of the mask is packed into
  // Offsets in the index. Each section ends where the next begins.
  int64_t starts = 0, refs = 0, pieces = 0, splits = 0, order = 0, end = 0;
  int64_t bits = 0, before = 0;  // in the workspace, [rows][words]: the mask's bits, and the row's blocks before each
                                 // word
  int64_t counts = 0, keys = 0, unsorted = 0;  // [rows], [rows + kMaxSlots] of pieces, [rows + kMaxSlots] of Piece
  int32_t cap = 0, most_slices = 0;            // split_cap(), most_slices()
};

// All offsets are in words of 32 bits.
struct DeviceIndexPlan {
  Header header;  // without the counts of pieces, splits and slots
  DeviceIndexSide by_out, by_in;
  int64_t out_of = 0, words = 0, workspace_words = 0;
};

Result<DeviceIndexPlan> plan_device_index(const LayoutView::Sizes& sizes);

// Checks the arguments of a call and returns its plan.
Result<DeviceIndexPlan> check_device_index(const uint8_t* mask, const LayoutView::Sizes& sizes,
                                           std::span<const int32_t> index, Device device, Workspace workspace);

}  // namespace blocksparse
