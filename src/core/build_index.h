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

// Where each of `rows` rows begins: how many keys are smaller, and last the number of all.
std::vector<int32_t> prefix_sum(std::span<const int32_t> keys, int64_t rows);

// All tables from a CSR that is known to be right.
std::shared_ptr<const std::vector<int32_t>> build_index(const Grid& grid, std::span<const int32_t> row_start,
                                                        std::span<const int32_t> columns);

}  // namespace blocksparse
