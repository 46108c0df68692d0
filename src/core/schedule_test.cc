#include "core/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "blocksparse/device_index.h"
#include "core/index.h"

namespace blocksparse {
namespace {

Layout graph(const std::string& text) { return *Layout::from_graph(text, {.block_size = 32}, 5); }

TEST(Schedule, HasRoomForEveryNumberOfTilesOrNone) {
  for (const int64_t rows : {0, 1, 15, 16, 32, 33, 131, 132, 500, 639, 700, 3000, 5000}) {
    int64_t at = 0;
    for (const int32_t tiles : kScheduleTiles) {
      const ScheduleShape shape = schedule_shape(rows, tiles);
      EXPECT_EQ(shape.at, at);
      EXPECT_EQ(shape.groups, kScheduleSms / tiles);
      EXPECT_TRUE(shape.waves == 0 || (shape.groups * shape.waves >= rows && rows >= shape.groups)) << rows;
      EXPECT_LE(shape.waves, kMostScheduleWaves);
      at += int64_t{shape.groups} * shape.waves;
    }
    EXPECT_EQ(schedule_numbers(rows), at);
    EXPECT_EQ(schedule_shape(rows, 3).waves, 0);
  }
  EXPECT_EQ(schedule_words(288, 576) % 16, 0);
  EXPECT_EQ(schedule_words(15, 15), 0);
}

// What every group has, in blocks and one for each row; every row must be there once, and nothing behind a gap.
std::vector<int64_t> loads_of(const RowWalk& walk, const ScheduleShape& shape, const uint16_t* numbers) {
  const size_t rows = walk.starts.size() - 1;
  std::vector<int> seen(rows, 0);
  std::vector<int64_t> loads(static_cast<size_t>(shape.groups), 0);
  for (int32_t group = 0; group < shape.groups; ++group) {
    bool ended = false;
    for (int32_t wave = 0; wave < shape.waves; ++wave) {
      const size_t row = numbers[wave * shape.groups + group];
      EXPECT_TRUE(row <= rows && !(ended && row > 0));
      ended = row == 0;
      if (ended || row > rows) continue;
      ++seen[row - 1];
      loads[static_cast<size_t>(group)] += walk.starts[row] - walk.starts[row - 1] + 1;
    }
  }
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; }));
  return loads;
}

TEST(Schedule, DealsEveryRowOnceAndEvenly) {
  for (const char* name : {"ba(288,3,blocks=2448)", "ba(576,8,blocks=9792)", "ba(140,4)"}) {
    const Layout layout = graph(name);
    const std::vector<int32_t> index = index_for_card(layout);
    const Header& h = header_of(layout);
    const auto* numbers =
        reinterpret_cast<const uint16_t*>(index.data() + index_sections(h.out_blocks, h.in_blocks, h.blocks).words);
    ASSERT_EQ(reinterpret_cast<const Header*>(index.data())->reserved[kScheduled], 3) << name;
    for (const bool by_in : {false, true}) {
      const RowWalk walk = walk_of(layout, by_in);
      int64_t longest = 0;
      for (size_t row = 1; row < walk.starts.size(); ++row) {
        longest = std::max<int64_t>(longest, walk.starts[row] - walk.starts[row - 1] + 1);
      }
      for (const int32_t tiles : kScheduleTiles) {
        const ScheduleShape shape = schedule_shape(by_in ? h.in_blocks : h.out_blocks, tiles);
        if (shape.waves == 0) continue;
        const auto loads = loads_of(walk, shape, numbers + (by_in ? schedule_numbers(h.out_blocks) : 0) + shape.at);
        const double mean = static_cast<double>(std::accumulate(loads.begin(), loads.end(), int64_t{0})) /
                            static_cast<double>(shape.groups);
        const auto most = static_cast<double>(*std::max_element(loads.begin(), loads.end()));
        EXPECT_LE(most, std::max(1.12 * mean, static_cast<double>(longest))) << name << ", " << tiles << " tiles";
      }
    }
  }
}

TEST(Schedule, IsMadeForACardAndWhereRowsAreCut) {
  const Layout uneven = graph("ba(288,3,blocks=2448)"), even = graph("random(200,200,0.05)");
  EXPECT_EQ(header_of(uneven).reserved[kScheduled], 0);
  EXPECT_EQ(index_for_card(uneven).size(), uneven.index().size());
  const std::vector<int32_t> index = index_for_card(even);
  EXPECT_EQ(reinterpret_cast<const Header*>(index.data())->reserved[kScheduled], 0);
  const Header& h = header_of(even);
  EXPECT_EQ(static_cast<int64_t>(index.size()), index_sections(h.out_blocks, h.in_blocks, h.blocks).words);
}

// Rows are cut, or columns; not both. Their numbers differ, too.
TEST(Schedule, MayBeOfOneDirection) {
  for (const bool by_in : {false, true}) {
    BlockCoordinates places{.out_blocks = by_in ? 300 : 140, .in_blocks = by_in ? 140 : 300, .out = {}, .in = {}};
    for (int32_t i = 0; i < 300; ++i) {  // a line of 300 blocks, and a block in each of the others
      places.out.push_back(by_in ? i : 7), places.in.push_back(by_in ? 7 : i);
      if (i != 7 && i < 140) places.out.push_back(i), places.in.push_back(i);
    }
    const Layout layout = *Layout::from_coordinates(places, {.block_size = 32});
    const std::vector<int32_t> index = index_for_card(layout);
    const Header& h = header_of(layout);
    ASSERT_EQ(reinterpret_cast<const Header*>(index.data())->reserved[kScheduled], by_in ? 2 : 1);
    const int64_t words = index_sections(h.out_blocks, h.in_blocks, h.blocks).words;
    EXPECT_GE(static_cast<int64_t>(index.size()), words + schedule_words(h.out_blocks, h.in_blocks));
    const auto* numbers =
        reinterpret_cast<const uint16_t*>(index.data() + words) + (by_in ? schedule_numbers(h.out_blocks) : 0);
    for (const int32_t tiles : kScheduleTiles) {
      const ScheduleShape shape = schedule_shape(140, tiles);
      if (shape.waves > 0) loads_of(walk_of(layout, by_in), shape, numbers + shape.at);
    }
  }
}

// A group that is full takes no more, however little it has.
TEST(Schedule, FitsWhateverTheRowsAre) {
  for (const int64_t heavy : {0, 1, 20, 131, 132}) {
    std::vector<int32_t> starts(301, 0);
    for (size_t row = 0; row < 300; ++row)
      starts[row + 1] = starts[row] + (static_cast<int64_t>(row) < heavy ? 4000 : 0);
    std::vector<uint16_t> numbers(static_cast<size_t>(schedule_numbers(300)), 7);
    write_schedules(starts, numbers);
    RowWalk walk;
    walk.starts = starts;
    for (const int32_t tiles : kScheduleTiles) {
      const ScheduleShape shape = schedule_shape(300, tiles);
      loads_of(walk, shape, numbers.data() + shape.at);
    }
  }
}

}  // namespace
}  // namespace blocksparse
