#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "blocksparse/blocksparse.h"
#include "core/random.h"
#include "graphs/place_set.h"

namespace blocksparse::graphs {
namespace {

Layout layout_of(std::string_view name, int64_t seed = 0) {
  auto layout = Layout::from_graph(name, {.block_size = 32}, seed);
  EXPECT_TRUE(layout.ok()) << name << ": " << layout.status().message();
  return *layout;
}

void expect_error(std::string_view name, std::string_view text, int64_t seed = 0) {
  const auto made = by_name(name, seed);
  ASSERT_FALSE(made.ok()) << name;
  EXPECT_EQ(made.status().code(), StatusCode::invalid_argument);
  EXPECT_NE(made.status().message().find(text), std::string::npos) << made.status().message();
}

TEST(Graphs, HaveTheBlocksTheyPromise) {
  EXPECT_EQ(layout_of("random(100,50,0.1)").blocks(), 500);
  EXPECT_EQ(layout_of("random(10,0.95)").blocks(), 95);
  EXPECT_EQ(layout_of("random(9,9,1)").blocks(), 81);
  EXPECT_EQ(layout_of("balanced(60,40,7)").blocks(), 420);
  EXPECT_EQ(layout_of("balanced(144,7,diagonal=1)").blocks(), 144 * 7);
  EXPECT_EQ(layout_of("ws(175,6,0.2)").blocks(), 175 * 7);
  EXPECT_EQ(layout_of("ws(5,4,0.5)").blocks(), 25) << "a complete graph has no edge to move";
  EXPECT_EQ(layout_of("ws2d(12,16,8,0.3)").blocks(), 12 * 16 * 9);
  EXPECT_EQ(layout_of("ws2d(3,3,8,0)").blocks(), 81) << "every node next to every other";
  EXPECT_EQ(layout_of("ba(384,8)").blocks(), 2 * 8 * 376 + 384 + 8 * 7);
  EXPECT_EQ(layout_of("ba(576,8,36)").blocks(), 9792);
  EXPECT_EQ(layout_of("ba(576,8,blocks=9792)").blocks(), 9792);
  EXPECT_EQ(layout_of("ba(20,2,extra=3,blocks=104)").blocks(), 104);
  EXPECT_EQ(layout_of("diagonal(112,7)").blocks(), 784);
  EXPECT_EQ(layout_of("diagonal(10,4)").blocks(), 16 + 16 + 4);
  EXPECT_EQ(layout_of("diagonal(5)").blocks(), 5);
  EXPECT_EQ(layout_of("banded(6,1)").blocks(), 16);
  EXPECT_EQ(layout_of("butterfly(16)").blocks(), 16 * 5);
  EXPECT_EQ(layout_of("dense(3,4)").blocks(), 12);
}

// Every platform makes these for ever: a changed hash is a changed layout in somebody's checkpoint.
TEST(Graphs, AreReproducible) {
  const std::pair<const char*, uint64_t> known[] = {
      {"random(64,64,0.1)", 0xd45b12a84bb9ce7au},
      {"random(8,6,0.9)", 0xb69acf99e66c7b9bu},
      {"balanced(60,40,7)", 0xce5b34eeb502baffu},
      {"balanced(9000,33,diagonal=1)", 0x1b537521efe92a69u},
      {"balanced(60,7,diagonal=1)", 0x1477ca8284633beu},
      {"ws(64,6,0.3)", 0x6f4a8a82c2406000u},
      {"ws2d(8,8,8,0.3)", 0xaeb7b6803e66c5c7u},
      {"ba(64,4)", 0xed280e44e9182c34u},
      {"ba(64,4,10)", 0xf0c99f1d58e05f3eu},
  };
  for (const auto& [name, hash] : known) {
    EXPECT_EQ(layout_of(name, 7).hash(), hash)
        << "{\"" << name << "\", 0x" << std::hex << layout_of(name, 7).hash() << "u},";
    EXPECT_NE(layout_of(name, 8).hash(), hash) << name << " does not depend on its seed";
  }
}

TEST(Graphs, BalancedRandomIsBalanced) {
  for (const char* name : {"balanced(175,175,7)", "balanced(60,40,7)", "balanced(30,90,4)", "balanced(5,5,5)",
                           "balanced(175,7,diagonal=1)"}) {
    const Report r = report(layout_of(name));
    EXPECT_EQ(r.out.min, r.out.max) << name;
    EXPECT_LE(r.in.max - r.in.min, 1) << name;
  }
}

// Beyond 2^18 blocks they are made another way.
TEST(Graphs, BalancedWithADiagonalHasEachOfItsBlocks) {
  for (const auto& [name, degree] : {std::pair{"balanced(60,7,diagonal=1)", 7},
                                     {"balanced(5,1,diagonal=1)", 1},
                                     {"balanced(6,6,diagonal=1)", 6},
                                     {"balanced(2,2,diagonal=1)", 2},
                                     {"balanced(9000,33,diagonal=1)", 33}}) {
    const Layout layout = layout_of(name, 3);
    const auto starts = layout.row_start(), columns = layout.columns();
    std::vector<int> of_column(static_cast<size_t>(layout.in_blocks()), 0);
    for (size_t i = 0; i + 1 < starts.size(); ++i) {
      const std::set<int32_t> row(columns.begin() + starts[i], columns.begin() + starts[i + 1]);
      EXPECT_EQ(row.size(), static_cast<size_t>(degree)) << name;
      EXPECT_TRUE(row.contains(static_cast<int32_t>(i))) << name << " row " << i;
      for (int32_t column : row) ++of_column[static_cast<size_t>(column)];
    }
    for (int count : of_column) EXPECT_EQ(count, degree) << name;
  }
}

// Beyond 2^24 blocks they are made another way.
TEST(Graphs, LargeBalancedRandomIsBalanced) {
  const auto made = balanced_random(16384, 16390, 1025, 3);
  ASSERT_TRUE(made.ok());
  const auto layout = Layout::from_coordinates(*made, {.block_size = 8});  // which refuses what is there twice
  ASSERT_TRUE(layout.ok()) << layout.status().message();
  const std::vector<int32_t> starts = layout->row_start();
  for (size_t row = 0; row + 1 < starts.size(); ++row) ASSERT_EQ(starts[row + 1] - starts[row], 1025);
  std::vector<int64_t> columns(16390, 0);
  for (int32_t column : layout->columns()) ++columns[static_cast<size_t>(column)];
  for (int64_t count : columns) ASSERT_TRUE(count == 1024 || count == 1025) << count;
  EXPECT_EQ(layout->hash(), 0x6c155b5463787de3u) << "another layout of the same seed";
}

TEST(Graphs, PlaceSetIsASet) {
  Random rng(1);
  PlaceSet mine;
  std::set<uint64_t> theirs;
  for (int i = 0; i < 100000; ++i) {
    const auto place = static_cast<uint64_t>(rng.below(500));
    if (rng.below(2) == 0) ASSERT_EQ(mine.insert(place), theirs.insert(place).second);
    else ASSERT_EQ(mine.erase(place), theirs.erase(place) == 1);
    const auto other = static_cast<uint64_t>(rng.below(500));
    ASSERT_EQ(mine.contains(other), theirs.contains(other));
  }
  std::set<uint64_t> all;
  mine.for_each([&](uint64_t place) { EXPECT_TRUE(all.insert(place).second); });
  EXPECT_EQ(all, theirs);
}

TEST(Graphs, UndirectedOnesAreSymmetricWithDiagonal) {
  for (const char* name :
       {"ws(60,6,0.5)", "ws2d(8,8,8,0.5)", "ba(60,4,10)", "diagonal(60,7)", "banded(60,3)", "butterfly(64)"}) {
    const Layout layout = layout_of(name);
    const Report r = report(layout);
    EXPECT_TRUE(r.symmetric) << name;
    EXPECT_GE(r.mix.front() * static_cast<double>(layout.out_blocks()), 1) << name;
    const auto starts = layout.row_start(), columns = layout.columns();
    for (size_t i = 0; i + 1 < starts.size(); ++i) {
      const std::set<int32_t> row(columns.begin() + starts[i], columns.begin() + starts[i + 1]);
      EXPECT_TRUE(row.contains(static_cast<int32_t>(i))) << name << " row " << i;
    }
  }
}

TEST(Graphs, WithoutRewiringWattsStrogatzIsARing) {
  const Layout layout = layout_of("ws(10,4,0)");
  const auto columns = layout.columns();
  EXPECT_EQ((std::vector<int32_t>{columns.begin(), columns.begin() + 5}), (std::vector<int32_t>{0, 1, 2, 8, 9}));
  EXPECT_EQ(report(layout_of("ws(60,2,0)")).diameter, 30);
}

// Published or verified figures of these graphs (Gray, Radford and Kingma 2017; networkx), with room for the seed.
struct Published {
  const char* name;
  double mean_path, clustering;
  int64_t min;  // 0: not checked
  double median;
};

TEST(Graphs, HavePublishedPathLengths) {
  for (const Published& p :
       {Published{"ba(576,8,blocks=9792)", 2.52, 0.08, 9, 12}, Published{"ws(576,16,0.2)", 2.93, 0.37, 0, 17},
        Published{"ba(288,4,10)", 2.76, 0.09, 5, 6}, Published{"ba(144,2,3)", 3.20, 0.11, 3, 4},
        Published{"ba(175,3,6)", 2.77, 0.14, 4, 5}, Published{"ws(175,6,0.2)", 3.66, 0.32, 0, 7},
        Published{"ba(112,3,6)", 2.58, 0.20, 4, 5}, Published{"ws(112,6,0.2)", 3.21, 0.32, 0, 7}}) {
    const Report r = report(layout_of(p.name));
    EXPECT_NEAR(r.mean_path, p.mean_path, 0.15) << p.name;
    EXPECT_NEAR(r.clustering, p.clustering, 0.06) << p.name;
    EXPECT_LT(r.mean_path, 5) << p.name;
    EXPECT_EQ(r.unreachable, 0) << p.name;
    if (p.min > 0) {
      EXPECT_EQ(r.out.min, p.min) << p.name;
    }
    EXPECT_NEAR(r.out.median, p.median, 1) << p.name;
  }
  EXPECT_NEAR(report(layout_of("ws(175,6,0)")).mean_path, 15.0, 0.1) << "the ring is no small world";
}

TEST(Graphs, MixReachesAllAfterAsManyStepsAsTheDiameter) {
  for (const char* name : {"ba(112,3,6)", "ws(112,6,0.2)", "ba(175,3,6)"}) {
    const Report r = report(layout_of(name));
    ASSERT_EQ(static_cast<int64_t>(r.mix.size()), r.diameter) << name;
    EXPECT_EQ(r.mix.back(), 1) << name;
    EXPECT_LT(r.mix[r.mix.size() - 2], 1) << name;
  }
}

TEST(Graphs, MixOfFreshGraphsMatchesThePublishedTable) {
  std::vector<Layout> steps;
  for (int64_t seed = 0; seed < 4; ++seed) steps.push_back(layout_of("ba(576,8,36)", seed));
  const auto shares = mix(steps);
  ASSERT_TRUE(shares.ok());
  const double published[] = {0.03, 0.45, 0.998, 1};
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR((*shares)[i], published[i], 0.03) << "step " << i;
  steps.push_back(layout_of("dense(3,4)"));
  EXPECT_FALSE(mix(steps).ok());
  EXPECT_TRUE(mix({})->empty());
}

TEST(Graphs, ReportKnowsPathsAndUnreachableBlocks) {
  const Report r = report(layout_of("diagonal(6,2)"));
  EXPECT_EQ(r.mean_path, 1);
  EXPECT_EQ(r.diameter, 1);
  EXPECT_NEAR(r.unreachable, 1 - 6.0 / 30, 1e-12);
  ASSERT_EQ(r.mix.size(), 1u);
  EXPECT_NEAR(r.mix[0], 2.0 / 6, 1e-12);
  // A triangle 0-1-2 and a node 3 on 2: local clusterings 1, 1, 1/3, 0.
  auto paw = Layout::from_coordinates({4, 4, {0, 1, 0, 2, 1, 2, 2, 3}, {1, 0, 2, 0, 2, 1, 3, 2}}, {.block_size = 8});
  EXPECT_NEAR(report(*paw).clustering, (1 + 1 + 1.0 / 3 + 0) / 4, 1e-12);
  EXPECT_TRUE(report(layout_of("dense(3,4)")).mix.empty());
  // Directed: 0 -> 1 -> 2 (row = output).
  auto chain = Layout::from_coordinates({3, 3, {1, 2}, {0, 1}}, {.block_size = 8});
  EXPECT_NEAR(report(*chain).mean_path, 4.0 / 3, 1e-12);
  EXPECT_FALSE(report(*chain).symmetric);
  EXPECT_NEAR(report(chain->t()).mean_path, 4.0 / 3, 1e-12);
  EXPECT_EQ(report(layout_of("diagonal(5)")).unreachable, 1) << "no block reaches another";
  // Rows of 0, 1, 2 and 4 blocks: the median is the mean of the middle two.
  auto rows = Layout::from_coordinates({4, 4, {1, 2, 2, 3, 3, 3, 3}, {0, 0, 1, 0, 1, 2, 3}}, {.block_size = 8});
  EXPECT_EQ(report(*rows).out.median, 1.5);
}

TEST(Graphs, NamesMayHaveSpacesAndNamedArguments) {
  EXPECT_EQ(layout_of(" ws( 20, 4 , rewire=0.1 ) ").blocks(), 100);
  EXPECT_EQ(layout_of("random(4,in=8,density=0.5)").blocks(), 16);
  EXPECT_EQ(layout_of("ba(nodes=20,links=2)"), layout_of("ba(20,2)"));
}

TEST(Graphs, SayWhatIsWrong) {
  expect_error("random(65536,1)", "asks for 4294967296 blocks, at most 2147483647 fit");
  expect_error("butterfly(134217728)", "asks for 3758096384 blocks");
  expect_error("ba(4,8)", "links is 8, needs 1 to 3");
  expect_error("ba(4,0)", "links is 0");
  expect_error("ba(5,2,-1)", "extra is -1");
  expect_error("ba(5,2,100)", "the graph is complete");
  expect_error("ba(20,2,blocks=7)", "blocks is 7");
  expect_error("ba(20,2,blocks=95)", "plus an even number");
  expect_error("ws(10,3,0.1)", "neighbours is 3, needs an even number");
  expect_error("ws(10,10,0.1)", "neighbours is 10");
  expect_error("ws(10,4,1.5)", "rewire is 1.5, needs 0 to 1");
  expect_error("ws2d(3,3,8,2)", "rewire is 2");
  expect_error("ws2d(2,2,2,0.5)", "too small");
  expect_error("random(4,4,-0.1)", "density is -0.1");
  expect_error("random(4,4,nan)", "is no number");
  expect_error("random(0,4,0.5)", "0 blocks per side");
  expect_error("random(100000,100000,0.9)", "at most");
  expect_error("balanced(4,4,5)", "degree is 5, needs 0 to 4");
  expect_error("balanced(4,5,2,1)", "4 x 5 blocks, degree 2: a diagonal needs as many rows as columns");
  expect_error("balanced(4,0,diagonal=1)", "1 block or more in a row");
  expect_error("balanced(4,2,diagonal=2)", "diagonal is 2, needs 0 or 1");
  expect_error("banded(4,4)", "width is 4");
  expect_error("diagonal(4,0)", "group is 0");
  expect_error("butterfly(12)", "needs a power of two");
  expect_error("dense(-3)", "-3 blocks per side");
  expect_error("nonsense(4)", "there is no graph \"nonsense\"");
  expect_error("ba", "is no graph name");
  expect_error("ba(4,2", "is no graph name");
  expect_error("ba(4)", "does not fit ba(nodes,links");
  expect_error("ba(4,2,3,4,5)", "does not fit");
  expect_error("ba(4,2,colour=3)", "does not fit");
  expect_error("ba(4.5,2)", "nodes is 4.5, needs a whole number");
  expect_error("dense(1e300)", "out is 1e+300, needs a whole number");
  expect_error("ba(4,x)", "\"x\" is no number");
  expect_error("ba(nodes=4,2)", "needs a name");
  expect_error("ba(40,4)", "seed is -1", -1);
}

}  // namespace
}  // namespace blocksparse::graphs
