// Makes the tables of a layout that index.h describes, on the host.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "blocksparse/layout.h"

namespace blocksparse {

struct Grid {
  int64_t out_blocks, in_blocks;
  Blocking blocking;
};

// Where each of `rows` rows begins: entry r is the number of keys smaller than r, the last one the number of all keys.
std::vector<int32_t> prefix_sum(std::span<const int32_t> keys, int64_t rows);

// All tables of a CSR that has been checked.
std::shared_ptr<const std::vector<int32_t>> build_index(const Grid& grid, std::span<const int32_t> row_start,
                                                        std::span<const int32_t> columns);

}  // namespace blocksparse
