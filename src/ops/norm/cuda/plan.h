// How long rows are divided among threads on a card: pure functions, so they are tested without one.
#pragma once

#include <cstdint>

namespace blocksparse::norm {

// Rows that stay in registers from their first reading on: a thread has one vector of 16 bytes of several rows. A
// cluster of thread blocks shares the features, so that an SM reads gain and shift of a part of them alone, and its
// threads form groups with rows of their own.
struct WidePlan {
  int32_t cluster = 0;  // thread blocks that share the features; 0: rows are too long
  int32_t per = 0;      // vectors of each
  int32_t width = 0;    // threads of a group, whole warps
  int32_t groups = 0;   // of a thread block
  int32_t tokens = 0;   // of a group at a time
  int64_t parts = 0;    // clusters that share the tokens

  constexpr bool fits() const { return cluster > 0; }
  constexpr int32_t threads() const { return width * groups; }
  constexpr int32_t tokens_at_once() const { return groups * tokens; }
};

inline constexpr int kMostCluster = 8;  // that every card of 9.0 can place
// Of 5600 and 18432 features clusters of 4 and 8, us a step of the deep-update LSTM (H200, 2026-11-22). 5600: 124, with
// clusters of 2 125, of 8 132. The cell: clusters of 4 124, of 2 120, of 8 130.
inline constexpr int kBestWidth = 288, kBestCellWidth = 384;
inline constexpr int kWideThreads = 384;      // of a thread block: two fit an SM, each at another part of its work
inline constexpr int kManyRowsThreads = 320;  // likewise, with 8 rows of a thread
inline constexpr int kWideWarps = kWideThreads / 32;

// Of n tokens, whose groups of features have clusters of their own.
WidePlan plan_wide_forward(int64_t n, int64_t groups, int64_t vectors, int32_t multiprocessors);
// The four rows of a token go through the same threads, which walk all tokens of a cluster.
WidePlan plan_wide_cell(int64_t n, int64_t vectors, int32_t multiprocessors);

}  // namespace blocksparse::norm
