// Checks that the generators share.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/text.h"

namespace blocksparse::graphs {

inline Status check_nodes(const char* graph, int64_t nodes) {
  if (nodes < 1 || nodes > std::numeric_limits<int32_t>::max() - 1) {
    return invalid("[", graph, "] ", nodes, " blocks per side, needs 1 to ", std::numeric_limits<int32_t>::max() - 1);
  }
  return {};
}

inline Status check_blocks(const char* graph, double blocks) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (blocks > static_cast<double>(kMost)) {
    if (blocks > 0x1p62) return invalid("[", graph, "] asks for ", blocks, " blocks, at most ", kMost, " fit");
    return invalid("[", graph, "] asks for ", std::llround(blocks), " blocks, at most ", kMost, " fit");
  }
  return {};
}

inline Status check_seed(const char* graph, int64_t seed) {
  if (seed < 0) return invalid("[", graph, "] seed is ", seed, ", needs 0 or more");
  return {};
}

inline Status check_probability(const char* graph, const char* name, double value) {
  if (!(value >= 0 && value <= 1)) return invalid("[", graph, "] ", name, " is ", value, ", needs 0 to 1");
  return {};
}

}  // namespace blocksparse::graphs
