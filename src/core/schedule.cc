#include "core/schedule.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

namespace blocksparse {

namespace {

// The row's blocks, and one for what it takes besides.
int64_t cost_of(std::span<const int32_t> starts, int64_t row) {
  return starts[static_cast<size_t>(row) + 1] - starts[static_cast<size_t>(row)] + 1;
}

void deal(std::span<const int32_t> starts, std::span<const int64_t> longest_first, const ScheduleShape& shape,
          std::span<uint16_t> to) {
  using Load = std::pair<int64_t, int32_t>;  // what a group has had, and the group
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least;
  for (int32_t group = 0; group < shape.groups; ++group) least.emplace(0, group);
  std::vector<int32_t> waves(static_cast<size_t>(shape.groups), 0);
  for (const int64_t row : longest_first) {
    const auto [load, group] = least.top();
    least.pop();
    const int32_t wave = waves[static_cast<size_t>(group)]++;
    to[static_cast<size_t>(wave * shape.groups + group)] = static_cast<uint16_t>(row + 1);
    if (wave + 1 < shape.waves) least.emplace(load + cost_of(starts, row), group);  // else it is full
  }
}

}  // namespace

void write_schedules(std::span<const int32_t> starts, std::span<uint16_t> numbers) {
  const auto rows = static_cast<int64_t>(starts.size()) - 1;
  std::vector<int64_t> order(static_cast<size_t>(rows));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return cost_of(starts, a) > cost_of(starts, b); });
  std::fill(numbers.begin(), numbers.end(), uint16_t{0});
  for (const int32_t tiles : kScheduleTiles) {
    const ScheduleShape shape = schedule_shape(rows, tiles);
    if (shape.waves > 0) deal(starts, order, shape, numbers.subspan(static_cast<size_t>(shape.at)));
  }
}

}  // namespace blocksparse
