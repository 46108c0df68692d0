#include "gemm/cuda/wgrad_in_registers/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "core/places.h"
#include "gemm/cuda/wgmma/plan.h"

namespace blocksparse::gemm {

namespace {

// Cells of a unit of a strip of so many rows of blocks, if blocks are at random: on average, and at most, for one that
// a thread block cannot hold takes a second pass over the tokens. Strips differ, and units end between columns. Blocks
// of 8 come in pairs, of which the last of a row may lack one.
struct UnitCells {
  double average, most, blocks;
};

class StripCells {
 public:
  StripCells(const CudaProblem& p, int64_t strip_rows)
      : of_row_(static_cast<double>(p.blocks) / static_cast<double>(std::max<int64_t>(1, p.output_blocks()))),
        rows_(static_cast<double>(strip_rows)),
        cells_of_block_(p.block == 8 ? 0.5 : region_form_of(p.block).cells_of_block),
        in_pairs_(p.block == 8) {
    const double of_strip = of_row_ * rows_, of_column = of_strip / static_cast<double>(p.input_blocks());
    uneven_ = 1 + 2 / std::sqrt(std::max(1.0, of_strip));
    column_cells_ = (of_column + std::sqrt(of_column)) * cells_of_block_;
  }

  double average_of_all() const { return of_row_ * rows_ * cells_of_block_; }
  // One of so many units.
  UnitCells unit(double units) const {
    const double of_row = of_row_ / units, blocks = of_row * rows_, average = blocks * cells_of_block_;
    UnitCells cells{.average = average, .most = average * uneven_ + column_cells_, .blocks = blocks};
    if (!in_pairs_) return cells;
    const double odd = rows_ * (1 - std::exp(-2 * of_row)) / 2;  // rows of an odd number of blocks
    cells.average += odd / 2;
    cells.most += odd / 2 + std::sqrt(odd) / 2;
    return cells;
  }

 private:
  double of_row_, rows_, cells_of_block_, uneven_, column_cells_;
  bool in_pairs_;
};

// Clocks of a thread block for a step of tokens: shared memory is read and written 128 bytes at a time, which with all
// else is so many clocks a cell; or x and dy do not come faster, all thread blocks loading at once. Fitted to some
// forty plans for densities of .02 to .50, H200, 2026-11-24: mostly within a tenth.
double step_clocks(const CudaProblem& p, double cells, double features) {
  const double of_cell = p.block == 8 ? 10 : p.block == 16 ? 12 : 32;
  return std::max(cells * of_cell + features * kRegionTokens * 2 / 128, features * 0.9) + 100;
}

// Slices of dW for which there is room in the workspace; 0 for a large dW, which needs none to fill a card.
int64_t slices_with_room(const CudaProblem& p) {
  const int64_t bytes = std::max<int64_t>(1, p.blocks * p.block * p.block * 4);
  return std::min<int64_t>(kMostPartialBytes / bytes, kMostRegionSlices);
}

int32_t boxes_of_stage(const cuda::Card& card, int32_t stages) {
  constexpr int32_t kOther = 3072;  // barriers, and what CUDA keeps
  return std::min(32, (card.shared_bytes - kOther) / (stages * kRegionBoxBytes));
}

// dW in so many strips, where their dy leaves room for so many columns of blocks of x.
struct Strips {
  int64_t strips, rows;  // of blocks, each
  int32_t dy_boxes;
  int64_t room;
};
std::optional<Strips> in_strips(const CudaProblem& p, int32_t boxes, int64_t strips) {
  const int64_t rows = divide_up(p.output_blocks(), strips);
  const int32_t dy_boxes = region_dy_boxes(rows, p.block);
  if (rows > kMostStripRows || dy_boxes > kMostDyBoxes || divide_up(p.output_blocks(), rows) != strips) return {};
  const int64_t room = (int64_t{boxes - dy_boxes} * 64 - std::max(64 - p.block, 0)) / p.block;
  if (room < 1 || divide_up(p.input_blocks(), room) > kMostStripUnits) return {};
  return Strips{.strips = strips, .rows = rows, .dy_boxes = dy_boxes, .room = room};
}

// Units with as many blocks are not equally wide. What is too wide for one goes to the next, for which it needs room.
double least_units(const CudaProblem& p, const StripCells& cells, int64_t room) {
  const auto columns = static_cast<double>(p.input_blocks());
  const double capacity = region_form_of(p.block).cells();
  const auto fits = [&](double units) {
    const double of_room = static_cast<double>(room) * units / columns;
    const UnitCells of_unit = cells.unit(units);
    const double wide = 1 + 2 / std::sqrt(std::max(1.0, of_unit.blocks));  // of one unit in 50
    return of_room >= 1.04 && of_unit.most * (1 + std::max(0.0, wide - of_room)) <= capacity;
  };
  const double most = std::min<double>(kMostStripUnits, columns);
  double units = std::max(std::ceil(columns / static_cast<double>(room)), std::ceil(cells.average_of_all() / capacity));
  while (units < most && !fits(units)) ++units;
  return std::min(units, most);
}

// The best plan for so many stages, and its clocks.
RegionPlan plan_stages(const CudaProblem& p, const cuda::Card& card, int32_t stages, double& least) {
  const int32_t boxes = boxes_of_stage(card, stages);
  const auto columns = static_cast<double>(p.input_blocks());
  const double most_units = std::min<double>(kMostStripUnits, columns), capacity = region_form_of(p.block).cells();
  const double grid = card.multiprocessors, steps = static_cast<double>(divide_up(p.n, kRegionTokens));
  const auto most_slices =
      static_cast<int32_t>(std::max<int64_t>(1, std::min<int64_t>(slices_with_room(p), p.n / 256)));
  RegionPlan best{};
  for (int64_t i = 1; i <= std::min<int64_t>(p.output_blocks(), kMostRegionStrips); ++i) {
    const auto in = in_strips(p, boxes, i);
    if (!in) continue;
    const StripCells strip(p, in->rows);
    const auto strips = static_cast<double>(in->strips);
    const double fewest_units = least_units(p, strip, in->room);
    for (int32_t slices = 1; slices <= most_slices; ++slices) {
      // As many units as fill the card a whole number of times.
      const double rounds = std::ceil(fewest_units * strips * slices / grid);
      const double units = std::clamp(std::floor(rounds * grid / slices / strips), fewest_units, most_units);
      const UnitCells cells = strip.unit(units);
      const double features = 64.0 * in->dy_boxes + columns / units * p.block + 32;
      const double passes = std::max(1.0, std::ceil(cells.most / capacity));
      const double clocks = std::ceil(units * strips * slices / grid) * passes * steps / slices *
                                step_clocks(p, (cells.average + cells.most) / 2 / passes, features) +
                            (slices > 1 ? 6000 + slices * static_cast<double>(p.blocks * p.block * p.block) / 600 : 0);
      if (clocks >= least) continue;
      least = clocks;
      best = {.strips = static_cast<int32_t>(in->strips),
              .strip_rows = static_cast<int32_t>(in->rows),
              .units = static_cast<int32_t>(units),
              .slices = slices,
              .stages = stages,
              .boxes = boxes,
              .most_columns = static_cast<int32_t>(std::min(in->room, p.input_blocks()))};
    }
  }
  return best;
}

}  // namespace

// As few stages as there must be hold the widest units; one more is worth a tenth. Where strips may differ by much,
// their units differ in width by as much.
RegionPlan plan_regions(const CudaProblem& p, const cuda::Card& card) {
  double least = std::numeric_limits<double>::infinity();
  RegionPlan best = plan_stages(p, card, kLeastRegionStages, least);
  for (int32_t stages = kLeastRegionStages + 1; card.sm90a && !p.uneven && stages <= kMostRegionStages; ++stages) {
    double more = least * (stages == kLeastRegionStages + 1 ? 1.1 : 1.02);
    const RegionPlan plan = plan_stages(p, card, stages, more);
    if (plan.strips > 0) best = plan, least = more;
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
  const int32_t boxes = boxes_of_stage({}, kLeastRegionStages);
  for (int64_t strips = 1; strips <= std::min<int64_t>(p.output_blocks(), kMostRegionStrips); ++strips) {
    if (in_strips(p, boxes, strips)) return p.blocks < kMost / 4;
  }
  return false;
}

// us of bf16, H200, 2026-11-24, of regions and of `many`:
//
//   4096 x 4096, 4096 tokens    b = 8: of density .25 236, 217; .10 123, 213; .05 73, 210; .02 54, 182
//                               b = 16: .50 300, 212; .25 162, 209; .10 78, 206; .05 63, 144; .02 49, 80
//                               b = 32: .50 233, 208; .25 127, 163; .10 70, 86; .05 61, 55; .02 47, 51
//   4096 x 4096, 1024 tokens    b = 8: .10 45, 84   b = 16: .25 56, 81   b = 32: .25 48, 56; .10 34, 33
//   6144 x 6144, 8192 tokens    b = 8: .10 443, 859   b = 16: .25 604, 853; .10 280, 866
//                               b = 32: .25 542, 710; .10 276, 326
//   1024 x 1024, 4096 tokens    b = 8: .10 25, 35   b = 16: .25 26, 35   b = 32: .25 24, 29
//   hubs, 4096 tokens           b = 8: ba(512,16) 122, 211   b = 16: ba(256,16) 169, 224
//
// Without `many` (sm_80) there are `few`, of less than 2048 tokens, and the generic kernel besides; not measured.
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
    case 8: return density < 0.21;
    case 16: return density >= 0.01 && density < 0.33;
    case 32: return density >= 0.07 && density < 0.4;
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

}  // namespace blocksparse::gemm
