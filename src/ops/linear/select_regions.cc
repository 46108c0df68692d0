#include "ops/linear/select_regions.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/places.h"
#include "ops/linear/select_many.h"

namespace blocksparse::linear {

namespace {

// Cells that a thread block has to hold: blocks of 8 come in pairs, of which the last of a row may lack one.
double cells_of(const CudaProblem& p) {
  const auto blocks = static_cast<double>(p.blocks);
  return p.block == 8 ? 0.55 * blocks : blocks * region_form_of(p.block).cells_of_block;
}

// What a unit should hold at most, for no two hold the same: one with more takes a second pass over the tokens.
double capacity_of(const CudaProblem& p) {
  return (p.block == 8 ? 0.8 : p.block == 16 ? 0.92 : 0.85) * region_form_of(p.block).cells();
}

// Clocks of a thread block for a step of tokens: shared memory is read 128 bytes at a time.
double step_clocks(const CudaProblem& p, double cells, double features) {
  const double of_cell = p.block == 8 ? 4.5 : p.block == 16 ? 5 : 12;
  return cells * of_cell + features * kRegionTokens * 2 / 128 + 60;
}

// Slices of dW for which there is room in the workspace; 0 for a large dW, which needs none to fill a card.
int64_t slices_with_room(const CudaProblem& p) {
  const int64_t bytes = std::max<int64_t>(1, p.blocks * p.block * p.block * 4);
  return std::min<int64_t>(kMostPartialBytes / bytes, kMostRegionSlices);
}

}  // namespace

RegionPlan plan_regions(const CudaProblem& p, const cuda::Card& card) {
  const int64_t rows = std::max<int64_t>(1, p.output_blocks()), columns = std::max<int64_t>(1, p.input_blocks());
  constexpr int32_t kOther = 3072;  // barriers, and what CUDA keeps
  const int32_t boxes = std::min(32, (card.shared_bytes - kOther) / (kRegionStages * kRegionBoxBytes));
  const double cells = cells_of(p), capacity = capacity_of(p);
  const double grid = card.multiprocessors, steps = static_cast<double>(divide_up(p.n, kRegionTokens));
  const auto most_slices =
      static_cast<int32_t>(std::max<int64_t>(1, std::min<int64_t>(slices_with_room(p), p.n / 256)));
  RegionPlan best{};
  double least = std::numeric_limits<double>::infinity();
  for (int64_t strips = 1; strips <= std::min<int64_t>(rows, kMostRegionStrips); ++strips) {
    const int64_t strip_rows = divide_up(rows, strips);
    if (strip_rows > kMostStripRows || divide_up(rows, strip_rows) != strips) continue;
    const int64_t room = (boxes - divide_up(strip_rows * p.block, 64)) * 64 / p.block;
    if (room < 1) continue;
    // Units that are too wide are cut once more: room for all of these.
    const int64_t most_units = kMostStripUnits - divide_up(columns, room);
    if (most_units < 1) continue;
    for (int32_t slices = 1; slices <= most_slices; ++slices) {
      // As many units as fill the card a whole number of times.
      double units = std::max({1.0, cells / capacity / static_cast<double>(strips),
                               static_cast<double>(columns) / (0.9 * static_cast<double>(room))});
      const double rounds = std::ceil(units * static_cast<double>(strips) * slices / grid);
      units = std::min({std::floor(rounds * grid / slices / static_cast<double>(strips)), static_cast<double>(columns),
                        static_cast<double>(most_units)});
      units = std::max(units, 1.0);
      const double all = units * static_cast<double>(strips);
      const double features = static_cast<double>((static_cast<double>(columns) / units + strip_rows) * p.block);
      const double passes = std::ceil(cells / all / capacity);
      const double clocks =
          std::ceil(all * slices / grid) * passes * steps / slices * step_clocks(p, cells / all / passes, features) +
          (slices > 1 ? slices * static_cast<double>(p.blocks * p.block * p.block) / 400 : 0);
      if (clocks >= least) continue;
      least = clocks;
      best = {.strips = static_cast<int32_t>(strips),
              .strip_rows = static_cast<int32_t>(strip_rows),
              .units = static_cast<int32_t>(units),
              .slices = slices,
              .boxes = boxes,
              .most_columns = static_cast<int32_t>(std::min(room, columns))};
    }
  }
  return best;
}

bool regions_support(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (p.pass != Pass::wgrad || size_of(p.dtype) != 2 || p.n < kLeastRegionTokens || p.n >= kMost || p.pairs != 1)
    return false;
  if (!p.w_aligned || !p.x_in_rows || p.x_first || p.inputs < 1 || p.outputs < 1) return false;
  if (p.input_blocks() > kMostRegionColumns || p.output_blocks() > int64_t{kMostRegionStrips} * kMostStripRows) {
    return false;
  }
  if (p.gated && slices_with_room(p) < 1) return false;
  // Also on the card with the least shared memory.
  return p.blocks < kMost / 4 && plan_regions(p, {.multiprocessors = 1}).strips > 0;
}

// us of bf16, H200, 2026-11-22, regions (many).
//   4096 x 4096, 4096 tokens, density .25, .10, .05, .02    b = 8: 646 (217), 236 (213), 149 (211), 92 (185)   b = 16:
//   347 (209), 170 (204), of .02 79 (71)   b = 32: 197 (162), 138 (81), of .02 101 (49)
//   the same of 2048 tokens    b = 8: of .10 138 (124), .05 95 (122)   b = 16: 191 (121), 97 (117), of .02 50 (43)
//   14336 x 4096, 8192 tokens, .10    b = 8: 1563 (1325)   b = 16: 1087 (1277), of .25 1940 (1316)   b = 32: 700 (531)
// Without `many` (sm_80) there is only the generic kernel besides; not measured.
bool regions_pay(const CudaProblem& p, const cuda::Card& card) {
  if (p.n < 1024) return false;
  if (!card.sm90a || !many_supports(p)) return true;
  const double grid = static_cast<double>(p.output_blocks()) * static_cast<double>(p.input_blocks());
  const double density = static_cast<double>(p.blocks) / std::max(1.0, grid);
  // A small dW has few cells for many thread blocks, each of which reads x and dy: 256 x 256, b = 16, 50,000 tokens 422
  // us, `many` with as many cells 46.
  constexpr int64_t kSmall = int64_t{512} * 512;
  if (p.inputs * p.outputs <= kSmall) return false;
  switch (p.block) {
    case 8: return density < 0.085;
    case 16: return density >= 0.03 && density < 0.13;
    default: return false;
  }
}

RegionPlaces region_places(const CudaProblem& p) {
  RegionPlaces at{};
  Places places;
  const int64_t values = p.blocks * p.block * p.block * 4;
  at.entries = places.next(p.blocks * (p.block == 8 ? 2 : 1) * 8);
  at.units = places.next(int64_t{kMostRegionStrips} * kMostStripUnits * 16);
  at.counts = places.next(kMostRegionStrips * 4);
  at.partial = places.next(values * slices_with_room(p));
  at.end = places.end;
  return at;
}

}  // namespace blocksparse::linear
