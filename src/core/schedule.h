// Rows of blocks dealt to a card's multiprocessors, behind the tables of a layout some of whose rows are cut. For 1, 2,
// 4 or 8 tiles of tokens as many thread blocks take a row side by side, so rows are dealt to 132, 66, 33 or 16 groups
// of them. index_for_card() fills the room: rows longest first, each to the group that has least.
//
//   by_out   for each number of tiles: rows  [waves][groups]  1 + the row of blocks that a group takes in this wave; 0:
//                                                             none, and none behind it
//   by_in    the same of columns
#pragma once

#include <cstdint>
#include <span>

#include "core/ceil_div.h"

namespace blocksparse {

inline constexpr int32_t kScheduleSms = 132;  // of H100 and H200
inline constexpr int32_t kScheduleTiles[] = {1, 2, 4, 8};
inline constexpr int32_t kMostScheduleWaves = 32;  // a lane of a warp reads each

// The word of Header::reserved that says whose room is filled: 1 by_out's, 2 by_in's.
inline constexpr int kScheduled = 2;

// Sizes of one number of tiles.
struct ScheduleShape {
  int32_t groups, waves;
  int64_t at;  // where it begins in its direction, in numbers of 16 bits
};

// Half as many waves again as rows of equal length would need, and two. waves is 0 where there is no schedule: every
// group needs a row, and a lane reads each wave.
constexpr ScheduleShape schedule_shape(int64_t rows, int32_t tiles) {
  ScheduleShape shape{};
  for (const int32_t t : kScheduleTiles) {
    shape.at += int64_t{shape.groups} * shape.waves;
    shape.groups = kScheduleSms / t;
    const int64_t waves = ceil_div(3 * ceil_div(rows, int64_t{shape.groups}), int64_t{2}) + 2;
    shape.waves = rows >= shape.groups && waves <= kMostScheduleWaves ? static_cast<int32_t>(waves) : 0;
    if (t == tiles) return shape;
  }
  return {};
}

constexpr int64_t schedule_numbers(int64_t rows) {
  const ScheduleShape last = schedule_shape(rows, kScheduleTiles[3]);
  return last.at + int64_t{last.groups} * last.waves;
}

// Room for both directions. A multiple of 16 words, so that the length of tables still tells which directions are cut.
constexpr int64_t schedule_words(int64_t out_blocks, int64_t in_blocks) {
  return round_up(ceil_div(schedule_numbers(out_blocks) + schedule_numbers(in_blocks), int64_t{2}), int64_t{16});
}

// Fills the room of one direction: `numbers` has schedule_numbers(rows), rows have starts[row + 1] - starts[row]
// blocks.
void write_schedules(std::span<const int32_t> starts, std::span<uint16_t> numbers);

}  // namespace blocksparse
