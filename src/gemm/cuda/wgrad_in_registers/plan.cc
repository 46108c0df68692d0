#include "gemm/cuda/wgrad_in_registers/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "core/ceil_div.h"
#include "core/places.h"
#include "gemm/cuda/wgrad_stream/plan.h"
#include "gemm/cuda/wgrad_wgmma/plan.h"

namespace blocksparse::gemm::wgrad_in_registers {

namespace {

// The patches of a job in a strip of so many rows, if blocks are at random: on average, and at most. `most` is above
// the average because strips differ and jobs end between columns. It matters because a job that a thread block cannot
// hold takes a second pass over the tokens. Blocks of 8 come in pairs, and the last pair of a row may lack one.
struct JobPatches {
  double average, most, blocks;
};

class StripPatches {
 public:
  StripPatches(const CudaProblem& p, int64_t strip_rows)
      : of_row_(static_cast<double>(p.blocks) / static_cast<double>(std::max<int64_t>(1, p.output_blocks()))),
        rows_(static_cast<double>(strip_rows)),
        patches_of_block_(p.block == 8 ? 0.5 : form_of(p.block).patches_of_block),
        in_pairs_(p.block == 8) {
    const double of_strip = of_row_ * rows_, of_column = of_strip / static_cast<double>(p.input_blocks());
    uneven_ = 1 + 2 / std::sqrt(std::max(1.0, of_strip));
    column_patches_ = (of_column + std::sqrt(of_column)) * patches_of_block_;
  }

  double average_of_all() const { return of_row_ * rows_ * patches_of_block_; }
  // The patches of one job, if the strip has so many jobs.
  JobPatches job(double jobs) const {
    const double of_row = of_row_ / jobs, blocks = of_row * rows_, average = blocks * patches_of_block_;
    JobPatches patches{.average = average, .most = average * uneven_ + column_patches_, .blocks = blocks};
    if (!in_pairs_) return patches;
    const double odd = rows_ * (1 - std::exp(-2 * of_row)) / 2;  // rows of an odd number of blocks
    patches.average += odd / 2;
    patches.most += odd / 2 + std::sqrt(odd) / 2;
    return patches;
  }

 private:
  double of_row_, rows_, patches_of_block_, uneven_, column_patches_;
  bool in_pairs_;
};

// Clocks of a thread block for a step of tokens. Either shared memory bounds it, which moves 128 bytes a clock; with
// all else that is so many clocks a patch. Or loads bound it, while all thread blocks load at once. Fitted to some
// forty plans of densities .02 to .50 (H200, 2026-11-24), mostly within a tenth.
double step_clocks(const CudaProblem& p, double patches, double features) {
  const double of_patch = p.block == 8 ? 10 : p.block == 16 ? 12 : 32;
  return std::max(patches * of_patch + features * kTokens * 2 / 128, features * 0.9) + 100;
}

// How many slices of dW the workspace has room for. It is 0 for a large dW, which fills the card without slices.
int64_t slices_with_room(const CudaProblem& p) {
  const int64_t bytes = std::max<int64_t>(1, p.blocks * p.block * p.block * 4);
  return std::min<int64_t>(kMostPartialBytes / bytes, kMostSlices);
}

int32_t boxes_of_stage(const cuda::Card& card, int32_t stages) {
  constexpr int32_t kOther = 3072;  // barriers, and what CUDA keeps
  return std::min(32, (card.shared_bytes - kOther) / (stages * kBoxBytes));
}

// dW cut into strips. Beside a strip's dy a stage has room for `room` columns of blocks of x.
struct Strips {
  int64_t strips, rows;  // of blocks, each
  int32_t dy_boxes;
  int64_t room;
};
std::optional<Strips> in_strips(const CudaProblem& p, int32_t boxes, int64_t strips) {
  const int64_t rows = ceil_div(p.output_blocks(), strips);
  const int32_t dy_boxes = dy_boxes_of(rows, p.block);
  if (rows > kMostStripRows || dy_boxes > kMostDyBoxes || ceil_div(p.output_blocks(), rows) != strips) return {};
  const int64_t room = (int64_t{boxes - dy_boxes} * 64 - std::max(64 - p.block, 0)) / p.block;
  if (room < 1 || ceil_div(p.input_blocks(), room) > kMostStripJobs) return {};
  return Strips{.strips = strips, .rows = rows, .dy_boxes = dy_boxes, .room = room};
}

// The fewest jobs of a strip that fit. Jobs of as many blocks are not equally wide: what is too wide for one job goes
// to the next, which needs room for it.
double least_jobs(const CudaProblem& p, const StripPatches& patches, int64_t room) {
  const auto columns = static_cast<double>(p.input_blocks());
  const double capacity = form_of(p.block).patches();
  const auto fits = [&](double jobs) {
    const double of_room = static_cast<double>(room) * jobs / columns;
    const JobPatches of_job = patches.job(jobs);
    const double wide = 1 + 2 / std::sqrt(std::max(1.0, of_job.blocks));  // of one job in 50
    return of_room >= 1.04 && of_job.most * (1 + std::max(0.0, wide - of_room)) <= capacity;
  };
  const double most = std::min<double>(kMostStripJobs, columns);
  double jobs =
      std::max(std::ceil(columns / static_cast<double>(room)), std::ceil(patches.average_of_all() / capacity));
  while (jobs < most && !fits(jobs)) ++jobs;
  return std::min(jobs, most);
}

// The best plan with so many stages, if it takes fewer clocks than `least`, which becomes its clocks.
Plan plan_stages(const CudaProblem& p, const cuda::Card& card, int32_t stages, double& least) {
  const int32_t boxes = boxes_of_stage(card, stages);
  const auto columns = static_cast<double>(p.input_blocks());
  const double most_jobs = std::min<double>(kMostStripJobs, columns), capacity = form_of(p.block).patches();
  const double grid = card.multiprocessors, steps = static_cast<double>(ceil_div(p.n, kTokens));
  const auto most_slices =
      static_cast<int32_t>(std::max<int64_t>(1, std::min<int64_t>(slices_with_room(p), p.n / 256)));
  Plan best{};
  for (int64_t i = 1; i <= std::min<int64_t>(p.output_blocks(), kMostStrips); ++i) {
    const auto in = in_strips(p, boxes, i);
    if (!in) continue;
    const StripPatches strip(p, in->rows);
    const auto strips = static_cast<double>(in->strips);
    const double fewest_jobs = least_jobs(p, strip, in->room);
    for (int32_t slices = 1; slices <= most_slices; ++slices) {
      // As many jobs as fill the card a whole number of times.
      const double waves = std::ceil(fewest_jobs * strips * slices / grid);
      const double jobs = std::clamp(std::floor(waves * grid / slices / strips), fewest_jobs, most_jobs);
      const JobPatches patches = strip.job(jobs);
      const double features = 64.0 * in->dy_boxes + columns / jobs * p.block + 32;
      const double passes = std::max(1.0, std::ceil(patches.most / capacity));
      const double clocks = std::ceil(jobs * strips * slices / grid) * passes * steps / slices *
                                step_clocks(p, (patches.average + patches.most) / 2 / passes, features) +
                            (slices > 1 ? 6000 + slices * static_cast<double>(p.blocks * p.block * p.block) / 600 : 0);
      if (clocks >= least) continue;
      least = clocks;
      best = {.strips = static_cast<int32_t>(in->strips),
              .strip_rows = static_cast<int32_t>(in->rows),
              .jobs = static_cast<int32_t>(jobs),
              .slices = slices,
              .stages = stages,
              .boxes = boxes,
              .most_columns = static_cast<int32_t>(std::min(in->room, p.input_blocks()))};
    }
  }
  return best;
}

}  // namespace

// The fewest stages leave room for the widest jobs. One more stage is worth a tenth. Where strips may differ by much,
// the widths of jobs do too, and the fewest stages stay.
Plan plan_of(const CudaProblem& p, const cuda::Card& card) {
  double least = std::numeric_limits<double>::infinity();
  Plan best = plan_stages(p, card, kLeastStages, least);
  for (int32_t stages = kLeastStages + 1; card.sm90a && !p.uneven && stages <= kMostStages; ++stages) {
    double more = least * (stages == kLeastStages + 1 ? 1.1 : 1.02);
    const Plan plan = plan_stages(p, card, stages, more);
    if (plan.strips > 0) best = plan, least = more;
  }
  return best;
}

bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (p.pass != Pass::wgrad || size_of(p.dtype) != 2 || p.n < kLeastTokens || p.n >= kMost || p.pairs != 1)
    return false;
  if (!p.w_aligned || !p.x_in_rows || p.x_first || p.inputs < 1 || p.outputs < 1) return false;
  if (p.input_blocks() > kMostColumns || p.output_blocks() > int64_t{kMostStrips} * kMostStripRows) {
    return false;
  }
  if (p.gated && slices_with_room(p) < 1) return false;
  // It must fit the card with the least shared memory too.
  const int32_t boxes = boxes_of_stage({}, kLeastStages);
  for (int64_t strips = 1; strips <= std::min<int64_t>(p.output_blocks(), kMostStrips); ++strips) {
    if (in_strips(p, boxes, strips)) return p.blocks < kMost / 4;
  }
  return false;
}

// NOTES.md has the measurements, of H200 and H100. Without wgrad_wgmma (sm_80) the other families are generic and,
// below 2048 tokens, wgrad_stream; the bound of 1024 tokens is not measured.
bool pays_beside_wgmma(const CudaProblem& p, const cuda::Card& card) {
  if (!card.sm90a) return p.n >= 1024;
  if (!wgrad_wgmma::supports(p)) return true;
  // A small dW has few patches for many thread blocks, and each of these reads x and dy. A dW of 256 x 256 (b = 16,
  // 50,000 tokens) took 422 us; wgrad_wgmma takes 46.
  const int64_t least_side = p.n < 2048 ? 513 : 448;
  if (p.inputs * p.outputs < least_side * least_side) return false;
  const double density = p.density();
  switch (p.block) {
    case 8: return density < (p.n < 2048 ? 0.3 : 0.21);
    case 16: return density >= 0.01 && density < 0.33;
    case 32: return density < 0.03 || (density >= (p.n < 4096 ? 0.15 : p.n < 8192 ? 0.07 : 0.04) && density < 0.4);
    default: return false;
  }
}

int64_t least_tokens(const CudaProblem&) { return 512; }

bool pays(const CudaProblem& p, const cuda::Card& card) {
  return pays_beside_wgmma(p, card) && !wgrad_stream::is_best(p, card);
}

WorkspacePlaces workspace_places(const CudaProblem& p) {
  WorkspacePlaces at{};
  Places places;
  const int64_t values = p.blocks * p.block * p.block * 4;
  at.entries = places.next(p.blocks * (p.block == 8 ? 2 : 1) * 8);
  at.jobs = places.next(int64_t{kMostStrips} * kMostStripJobs * 16);
  at.counts = places.next(kMostStrips * 4);
  at.partial = places.next(values * slices_with_room(p));
  at.end = places.end;
  return at;
}

// The workspace serves the last of several launches too, which has fewer tokens.
int64_t workspace_bytes(const CudaProblem& asked) {
  CudaProblem p = asked;
  p.n = std::min<int64_t>(p.n, std::numeric_limits<int32_t>::max());
  return supports(p) ? workspace_places(p).end : 0;
}

}  // namespace blocksparse::gemm::wgrad_in_registers
