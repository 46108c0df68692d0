// In which order strips of 64 outputs are best multiplied side by side: wgmma reads a chunk of 64 inputs once for all
// strips of a tile, if one of them has a block there. In random patterns of b = 64, density .25, pairs of strips that
// were chosen so read 9 to 12 % less than neighbours.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/tables.h"

namespace blocksparse::gemm::wgmma {

inline constexpr int32_t kStrip = 64;                // features
inline constexpr int32_t kMostOrderedStrips = 1024;  // of more the order is as they come: to search for one takes time

// Strips of rows; none where a block is more than one.
constexpr int64_t strips_of(int64_t features, int32_t block) {
  return block > kStrip ? 0 : (features + kStrip - 1) / kStrip;
}

// Of a tile: two of b = 64, four of smaller blocks.
constexpr int32_t strips_of_tile(int32_t block) { return block == kStrip ? 2 : 4; }

// strips_of() numbers, tile after tile. `starts` and `refs` as in index.h, `columns` blocks of inputs. The same on
// every machine.
std::vector<int32_t> order_strips(std::span<const int32_t> starts, std::span<const BlockRef> refs, int64_t columns,
                                  int64_t features, int32_t block);

}  // namespace blocksparse::gemm::wgmma
