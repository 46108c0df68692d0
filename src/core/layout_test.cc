#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include "blocksparse/blocksparse.h"
#include "core/index.h"

namespace blocksparse {
namespace {

constexpr Blocking k32{.block_size = 32};

Layout graph(std::string_view name, Blocking blocking = k32, int64_t seed = 0) {
  auto layout = Layout::from_graph(name, blocking, seed);
  EXPECT_TRUE(layout.ok()) << layout.status().message();
  return *layout;
}

template <class T>
void expect_error(const Result<T>& result, std::string_view text) {
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), StatusCode::invalid_argument);
  EXPECT_NE(result.status().message().find(text), std::string::npos) << result.status().message();
}

TEST(Layout, IsTheSameHoweverItIsMade) {
  const std::vector<uint8_t> mask = {1, 0, 1,  //
                                     0, 0, 0,  //
                                     0, 1, 1};
  const auto from_mask = Layout::from_mask(mask, 3, 3, k32);
  const auto from_coordinates = Layout::from_coordinates({3, 3, {2, 0, 2, 0}, {2, 2, 1, 0}}, k32);
  const auto from_csr = Layout::from_csr(std::vector<int64_t>{0, 2, 2, 4}, std::vector<int64_t>{0, 2, 1, 2}, 3, k32);
  ASSERT_TRUE(from_mask.ok() && from_coordinates.ok() && from_csr.ok());
  EXPECT_EQ(*from_mask, *from_coordinates);
  EXPECT_EQ(*from_mask, *from_csr);
  EXPECT_EQ(from_mask->hash(), from_csr->hash());
  EXPECT_EQ(from_mask->row_start(), (std::vector<int32_t>{0, 2, 2, 4}));
  EXPECT_EQ(from_mask->columns(), (std::vector<int32_t>{0, 2, 1, 2}));
  EXPECT_EQ(from_mask->describe(), "96 x 96 in blocks of 32: 4 of 9 (44.44 %)");
}

TEST(Layout, DiffersByPatternBlockSizeAndFeatures) {
  const Layout layout = graph("random(4,4,0.5)");
  EXPECT_NE(layout, graph("random(4,4,0.5)", k32, 1));
  EXPECT_NE(layout, graph("random(4,4,0.5)", {.block_size = 16}));
  EXPECT_NE(layout, graph("random(4,4,0.5)", {.block_size = 32, .out_features = 127}));
  EXPECT_NE(layout.hash(), graph("random(4,4,0.5)", {.block_size = 32, .in_features = 127}).hash());
}

TEST(Layout, TransposedViewExchangesSidesAndSharesTables) {
  const Layout layout = graph("random(3,5,0.5)", {.block_size = 8, .out_features = 20});
  const Layout t = layout.t();
  EXPECT_EQ(t.out_features(), layout.in_features());
  EXPECT_EQ(t.in_features(), 20);
  EXPECT_EQ(t.out_blocks(), 5);
  EXPECT_EQ(t.in_blocks(), 3);
  EXPECT_EQ(t.index().data(), layout.index().data());
  EXPECT_NE(t, layout);
  EXPECT_NE(t.hash(), layout.hash());
  EXPECT_EQ(t.t(), layout);
}

TEST(Layout, TablesOfBothDirectionsNameEveryBlockOnce) {
  for (const char* name : {"ba(200,4)", "dense(2,300)", "random(7,9,0)", "random(40,3,0.4)", "dense(1,1)"}) {
    const Layout layout = graph(name);
    for (bool by_in : {false, true}) {
      const RowWalk walk = walk_of(layout.view(), by_in);
      std::vector<int> seen(static_cast<size_t>(layout.blocks()), 0);
      std::vector<int> pieces_of(static_cast<size_t>(by_in ? layout.in_blocks() : layout.out_blocks()), 0);
      int32_t covered = 0, previous = std::numeric_limits<int32_t>::max(), slots = 0;
      for (const Piece& piece : walk.pieces) {
        if (piece.slot < 0) {
          EXPECT_LE(piece.last - piece.first, previous) << "whole rows are longest first";
          previous = piece.last - piece.first;
        }
        covered += piece.last - piece.first;
        slots += piece.slot >= 0;
        ++pieces_of[static_cast<size_t>(piece.to)];
        for (const BlockRef& ref : walk.of(piece)) ++seen[static_cast<size_t>(ref.weight)];
      }
      EXPECT_EQ(covered, layout.blocks()) << name;
      EXPECT_EQ(slots, walk.slots);
      EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; })) << name;
      EXPECT_TRUE(std::all_of(pieces_of.begin(), pieces_of.end(), [](int count) { return count >= 1; })) << name;
      int32_t next_slot = 0;
      for (const Split& split : walk.splits) {
        EXPECT_EQ(split.first_slot, next_slot);
        next_slot += split.slots;
        EXPECT_EQ(pieces_of[static_cast<size_t>(split.to)], split.slots);
      }
      EXPECT_EQ(next_slot, walk.slots);
    }
  }
}

// Counts to which the clusters of a card depend.
TEST(Layout, SlicesOfARowLieSideBySide) {
  for (const char* name : {"ba(200,4)", "ba(384,8)", "ba(300,20)", "dense(2,300)", "dense(3,4096)", "dense(1,33)"}) {
    const Layout layout = graph(name);
    for (bool by_in : {false, true}) {
      const RowWalk walk = walk_of(layout.view(), by_in);
      const int64_t rows = by_in ? layout.in_blocks() : layout.out_blocks();
      const int32_t most = most_slices(rows, by_in ? layout.out_blocks() : layout.in_blocks(), layout.blocks());
      int32_t seen = 0;
      for (size_t i = 0; i < walk.pieces.size(); ++i) {
        const Piece& piece = walk.pieces[i];
        if (piece.slot < 0) continue;
        const auto split =
            std::find_if(walk.splits.begin(), walk.splits.end(), [&](const Split& s) { return s.to == piece.to; });
        ASSERT_NE(split, walk.splits.end());
        EXPECT_TRUE(split->slots > 1 && (split->slots & (split->slots - 1)) == 0 && split->slots <= most) << name;
        EXPECT_EQ(piece.slot - split->first_slot, static_cast<int32_t>(i) % split->slots) << name << " piece " << i;
        EXPECT_EQ(static_cast<int32_t>(i), seen++) << name << ": slices come first";
      }
    }
  }
  EXPECT_EQ(most_slices(384, 384, 6456), 8) << "a row is never longer than 16 caps of 32";
  EXPECT_EQ(most_slices(384, 513, 6456), 512);
}

// Columns are cut as rows of the transposed matrix are: by their own number and by the length that they may have.
TEST(Layout, TablesByColumnsAreThoseOfTheTransposedMatrix) {
  BlockCoordinates hub{3000, 40, {}, {}};  // a column of 3000 blocks, and 39 columns of one
  for (int32_t row = 0; row < 3000; ++row) {
    hub.out.push_back(row), hub.in.push_back(0);
    if (row > 0 && row < 40) hub.out.push_back(row), hub.in.push_back(row);
  }
  for (const Layout& layout : {*Layout::from_coordinates(hub, k32), graph("ba(200,4)"), graph("dense(300,2)"),
                               graph("dense(2,300)"), graph("random(5,9,0.4)")}) {
    const auto rows = out_of(layout.view());
    const auto other = Layout::from_coordinates(
        {layout.in_blocks(), layout.out_blocks(), layout.columns(), {rows.begin(), rows.end()}}, k32);
    ASSERT_TRUE(other.ok()) << other.status().message();
    const RowWalk columns = walk_of(layout.view(), true), expected = walk_of(other->view(), false);
    EXPECT_EQ(columns.slots, expected.slots) << layout.describe();
    EXPECT_TRUE(
        std::equal(columns.starts.begin(), columns.starts.end(), expected.starts.begin(), expected.starts.end()));
    ASSERT_EQ(columns.pieces.size(), expected.pieces.size()) << layout.describe();
    for (size_t i = 0; i < expected.pieces.size(); ++i) {
      const Piece &a = columns.pieces[i], &b = expected.pieces[i];
      EXPECT_TRUE(a.to == b.to && a.first == b.first && a.last == b.last && a.slot == b.slot) << "piece " << i;
    }
  }
}

TEST(Layout, CutsHubsAndLeavesUniformRowsWhole) {
  EXPECT_EQ(walk_of(graph("dense(64,64)").view(), false).slots, 0);
  EXPECT_EQ(walk_of(graph("random(100,100,0.4)").view(), false).slots, 0) << "a row somewhat longer than the mean";
  EXPECT_EQ(walk_of(graph("balanced(384,384,38)").view(), false).slots, 0);
  EXPECT_GT(walk_of(graph("ba(384,8)").view(), false).slots, 0);
  EXPECT_GE(walk_of(graph("dense(1,4096)").view(), false).slots, 16) << "one row keeps many threads busy";
}

TEST(Layout, SurvivesItsPattern) {
  for (const Layout& layout :
       {graph("ba(50,3)"), graph("random(4,9,0.3)", {.block_size = 8, .in_features = 70}), graph("random(3,3,0)")}) {
    const auto pattern = layout.pattern();
    EXPECT_EQ(static_cast<int64_t>(pattern.size()), layout.pattern_words());
    const auto again = Layout::from_pattern(pattern);
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(*again, layout);
  }
}

TEST(Layout, RefusesEveryAlteredOrTruncatedPattern) {
  const std::vector<int32_t> pattern = graph("random(5,4,0.5)").pattern();
  for (size_t i = 0; i < pattern.size(); ++i) {
    std::vector<int32_t> altered = pattern;
    altered[i] ^= 1;
    EXPECT_FALSE(Layout::from_pattern(altered).ok()) << "word " << i;
    altered[i] = -1;
    if (pattern[i] != -1) {
      EXPECT_FALSE(Layout::from_pattern(altered).ok()) << "word " << i;
    }
    EXPECT_FALSE(Layout::from_pattern({pattern.data(), i}).ok()) << "cut to " << i;
  }
  expect_error(Layout::from_pattern({}), "no saved layout");
}

TEST(Layout, IndexHeaderIsChecked) {
  const Layout layout = graph("random(5,4,0.5)");
  std::vector<int32_t> index(layout.index().begin(), layout.index().end());
  ASSERT_TRUE(LayoutView::from_index(index).ok());
  EXPECT_EQ(LayoutView::from_index(index)->blocks, layout.blocks());
  expect_error(LayoutView::from_index({index.data(), index.size() - 1}), "its header asks for");
  expect_error(LayoutView::from_index({index.data(), 5}), "its header alone has 32");
  index[0] = 0;
  expect_error(LayoutView::from_index(index), "no layout index");
}

// The number of words is right, but no layout has such a header.
TEST(Layout, IndexHeaderMayNotContradictItself) {
  const Layout layout = graph("dense(2,2)");
  const auto spoilt = [&](auto spoil) {
    std::vector<int32_t> index(layout.index().begin(), layout.index().end());
    Header h;
    std::memcpy(&h, index.data(), sizeof(h));
    spoil(h);
    index.resize(static_cast<size_t>(index_sections(h.out_blocks, h.in_blocks, h.blocks).words));
    std::memcpy(index.data(), &h, sizeof(h));
    return LayoutView::from_index(index);
  };
  EXPECT_TRUE(spoilt([](Header&) {}).ok());
  constexpr std::string_view kDamaged = "index is damaged: its header contradicts itself";
  expect_error(spoilt([](Header& h) { h.blocks = 5; }), kDamaged);
  expect_error(spoilt([](Header& h) { h.out_features[0] = 65; }), kDamaged);
  expect_error(spoilt([](Header& h) { h.in_features[0] = 32; }), kDamaged);
  expect_error(spoilt([](Header& h) { h.by_out.pieces = 2 + kMaxSlots + 1; }), kDamaged);
  expect_error(spoilt([](Header& h) { h.by_in.pieces = 2 + kMaxSlots + 1; }), kDamaged);
  expect_error(spoilt([](Header& h) { h.by_out.slots = -1; }), kDamaged);
  expect_error(spoilt([](Header& h) { h.by_in.slots = kMaxSlots + 1; }), kDamaged);
}

TEST(Layout, SaysWhatIsWrong) {
  const std::vector<uint8_t> mask = {1, 0, 2, 1};
  expect_error(Layout::from_mask(mask, 2, 2, k32), "mask[1, 0] is 2, needs 0 or 1");
  expect_error(Layout::from_mask(mask, 2, 3, k32), "mask has 4 entries, 2 x 3 blocks need 6");
  expect_error(Layout::from_mask({}, -1, 2, k32), "grid of -1 x 2");
  expect_error(Layout::from_mask({}, 1LL << 40, 1LL << 40, k32), "grid of");
  expect_error(Layout::from_coordinates({2, 2, {0, 2}, {0, 0}}, k32), "block 1 is at (2, 0), outside of 2 x 2");
  expect_error(Layout::from_coordinates({2, 2, {0, -1}, {0, 0}}, k32), "outside");
  expect_error(Layout::from_coordinates({2, 2, {0, 1, 0}, {1, 1, 1}}, k32), "at (0, 1) is there twice");
  expect_error(Layout::from_coordinates({2, 2, {0, 1}, {1}}, k32), "2 out and 1 in");
  using Words = std::vector<int64_t>;
  expect_error(Layout::from_csr(Words{}, Words{}, 2, k32), "row_start is empty");
  expect_error(Layout::from_csr(Words{0, 2}, Words{1, 0}, 2, k32), "go 1, 0; they need to rise");
  expect_error(Layout::from_csr(Words{0, 2}, Words{1, 1}, 2, k32), "no block twice");
  expect_error(Layout::from_csr(Words{0, 1}, Words{2}, 2, k32), "columns[0] is 2, needs 0 to 1");
  expect_error(Layout::from_csr(Words{0, 2, 1}, Words{0}, 2, k32), "needs to rise to 1");
  expect_error(Layout::from_csr(Words{1, 1}, Words{0}, 2, k32), "goes from 1 to 1, needs 0 to 1");
  for (int32_t b : {0, -8, 1, 7, 24, 256}) {
    expect_error(Layout::from_mask({}, 0, 0, {.block_size = b}), "needs 8, 16, 32, 64 or 128");
  }
  const Blocking wide{.block_size = 32, .out_features = 65, .in_features = 0};
  expect_error(Layout::from_graph("dense(2)", wide), "out_features is 65, 2 blocks of 32 need 33 to 64");
  const Blocking negative{.block_size = 32, .out_features = 0, .in_features = -5};
  expect_error(Layout::from_graph("dense(2)", negative), "in_features is -5");
}

TEST(Layout, EmptyGridsAreLayoutsToo) {
  const auto none = Layout::from_mask({}, 0, 0, k32);
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(none->out_features(), 0);
  EXPECT_EQ(none->density(), 0);
  const auto no_columns = Layout::from_mask({}, 3, 0, k32);
  ASSERT_TRUE(no_columns.ok());
  EXPECT_EQ(no_columns->out_features(), 96);
}

}  // namespace
}  // namespace blocksparse
