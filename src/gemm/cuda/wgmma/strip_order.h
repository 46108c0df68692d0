// An order of strips of 64 outputs that lie side by side in a tile. wgmma reads a chunk of 64 inputs once for all
// strips of a tile if one of them has a block there, so strips with common chunks belong together. In random patterns
// of b = 64, density .25, pairs chosen this way read 9 to 12 % less than neighbours.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/ceil_div.h"
#include "core/tables.h"

namespace blocksparse::gemm::wgmma {

inline constexpr int32_t kStrip = 64;                // features
inline constexpr int32_t kMostOrderedStrips = 1024;  // more strips keep their order: the search takes time

// Strips of rows of blocks; none if a block is larger than a strip.
constexpr int64_t strips_of(int64_t features, int32_t block) { return block > kStrip ? 0 : ceil_div(features, kStrip); }

// Strips of a tile: two for b = 64, four for smaller blocks.
constexpr int32_t strips_of_tile(int32_t block) { return block == kStrip ? 2 : 4; }

// strips_of() numbers, tile after tile. `starts` and `refs` are those of index.h, `columns` is the number of input
// blocks. Every machine gives the same order.
std::vector<int32_t> order_strips(std::span<const int32_t> starts, std::span<const BlockRef> refs, int64_t columns,
                                  int64_t features, int32_t block);

}  // namespace blocksparse::gemm::wgmma
