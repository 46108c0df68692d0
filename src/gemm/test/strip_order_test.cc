#include "gemm/cuda/wgmma/strip_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "blocksparse/blocksparse.h"
#include "core/index.h"

namespace blocksparse::gemm::wgmma {
namespace {

std::vector<int32_t> order_of(const Layout& layout, bool by_in = false) {
  const IndexSections at = index_sections(layout.out_blocks(), layout.in_blocks(), layout.blocks());
  const std::vector<int32_t> index = index_for_card(layout);
  const auto first = index.begin() + (by_in ? at.by_in : at.by_out).order;
  return {first, first + strips_of(by_in ? layout.in_features() : layout.out_features(), layout.block_size())};
}

bool as_they_come(const std::vector<int32_t>& order) {
  return std::ranges::is_sorted(order) && (order.empty() || order[0] == 0);
}

// How many chunks of 64 inputs the tiles read, with strips in that order.
size_t reads_of(const Layout& layout, const std::vector<int32_t>& order, bool by_in = false) {
  const RowWalk walk = walk_of(layout.view(), by_in);
  const auto tile_strips = static_cast<size_t>(strips_of_tile(layout.block_size()));
  const int32_t strip_rows = kStrip / layout.block_size();
  const auto rows = static_cast<int32_t>(walk.starts.size()) - 1;
  size_t reads = 0;
  for (size_t first = 0; first < order.size(); first += tile_strips) {
    std::set<int32_t> chunks;
    for (size_t s = first; s < std::min(first + tile_strips, order.size()); ++s) {
      for (int32_t row = order[s] * strip_rows; row < std::min((order[s] + 1) * strip_rows, rows); ++row) {
        for (int32_t i = walk.starts[static_cast<size_t>(row)]; i < walk.starts[static_cast<size_t>(row) + 1]; ++i) {
          chunks.insert(walk.refs[static_cast<size_t>(i)].from * layout.block_size() / kStrip);
        }
      }
    }
    reads += chunks.size();
  }
  return reads;
}

TEST(StripOrder, HoldsEachStripOnceAndReadsLess) {
  for (const auto& [graph, block, by_in, share] : {std::tuple{"random(64,64,0.25)", 64, false, 0.94},
                                                   {"random(64,64,0.25)", 64, true, 0.94},
                                                   {"random(224,64,0.1)", 64, false, 0.94},
                                                   {"random(128,128,0.1)", 32, false, 0.9},
                                                   {"random(127,131,0.1)", 32, true, 0.92},
                                                   {"random(256,300,0.02)", 16, false, 0.95},
                                                   {"ba(150,6)", 8, false, 0.99}}) {
    SCOPED_TRACE(testing::Message() << graph << " b=" << block << (by_in ? " by_in" : ""));
    const Layout layout = *Layout::from_graph(graph, {.block_size = block}, 5);
    const std::vector<int32_t> order = order_of(layout, by_in);
    std::vector<int32_t> in_turn(order.size());
    std::iota(in_turn.begin(), in_turn.end(), 0);
    EXPECT_TRUE(std::ranges::is_permutation(order, in_turn));
    EXPECT_LT(static_cast<double>(reads_of(layout, order, by_in)),
              share * static_cast<double>(reads_of(layout, in_turn, by_in)));
  }
}

TEST(StripOrder, FindsRowsThatAreAlike) {
  // Strips 0 and 2 read the even chunks, 1 and 3 the odd ones.
  std::vector<uint8_t> mask(4 * 8);
  for (size_t i = 0; i < mask.size(); ++i) mask[i] = i % 2 == i / 8 % 2;
  const std::vector<int32_t> order = order_of(*Layout::from_mask(mask, 4, 8, {.block_size = 64}));
  EXPECT_EQ(order[0] % 2, order[1] % 2);
  EXPECT_EQ(order[2] % 2, order[3] % 2);
}

TEST(StripOrder, ThoseThatGainNothingStay) {
  EXPECT_TRUE(as_they_come(order_of(*Layout::from_graph("dense(40,40)", {.block_size = 64}))));
  EXPECT_TRUE(as_they_come(order_of(*Layout::from_graph("diagonal(40)", {.block_size = 64}))));
  EXPECT_TRUE(as_they_come(order_of(*Layout::from_graph("random(64,64,0)", {.block_size = 64}))));
  EXPECT_TRUE(as_they_come(order_of(*Layout::from_graph("random(2,64,0.2)", {.block_size = 64}))));
  EXPECT_TRUE(order_of(*Layout::from_graph("random(64,64,0.2)", {.block_size = 128})).empty());
  EXPECT_TRUE(as_they_come(order_of(*Layout::from_graph("random(1025,30,0.1)", {.block_size = 64})))) << "too many";
}

TEST(StripOrder, OfRaggedFeaturesHasEveryStrip) {
  const Layout layout = *Layout::from_graph("random(33,29,0.3)", {.block_size = 16, .out_features = 521}, 1);
  std::vector<int32_t> order = order_of(layout);
  EXPECT_EQ(order.size(), 9u);
  std::ranges::sort(order);
  EXPECT_TRUE(as_they_come(order));
}

TEST(StripOrder, IsTheSameEachTime) {
  const auto make = [] { return *Layout::from_graph("random(100,90,0.2)", {.block_size = 64}, 3); };
  EXPECT_EQ(order_of(make()), order_of(make()));
  EXPECT_FALSE(as_they_come(order_of(make())));
}

}  // namespace
}  // namespace blocksparse::gemm::wgmma
