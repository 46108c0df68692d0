#include "gemm/cuda/wgrad_in_registers/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "core/places.h"
#include "gemm/cuda/wgrad_stream/plan.h"
#include "gemm/cuda/wgrad_wgmma/plan.h"

namespace blocksparse::gemm::wgrad_in_registers {

namespace {

// Patches of a job of a strip of so many rows of blocks, if blocks are at random: on average, and at most, for one that
// a thread block cannot hold takes a second pass over the tokens. Strips differ, and jobs end between columns. Blocks
// of 8 come in pairs, of which the last of a row may lack one.
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
  // One of so many jobs.
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

// Clocks of a thread block for a step of tokens: shared memory is read and written 128 bytes at a time, which with all
// else is so many clocks a patch; or x and dy do not come faster, all thread blocks loading at once. Fitted to some
// forty plans for densities of .02 to .50, H200, 2026-11-24: mostly within a tenth.
double step_clocks(const CudaProblem& p, double patches, double features) {
  const double of_patch = p.block == 8 ? 10 : p.block == 16 ? 12 : 32;
  return std::max(patches * of_patch + features * kTokens * 2 / 128, features * 0.9) + 100;
}

// Slices of dW for which there is room in the workspace; 0 for a large dW, which needs none to fill a card.
int64_t slices_with_room(const CudaProblem& p) {
  const int64_t bytes = std::max<int64_t>(1, p.blocks * p.block * p.block * 4);
  return std::min<int64_t>(kMostPartialBytes / bytes, kMostSlices);
}

int32_t boxes_of_stage(const cuda::Card& card, int32_t stages) {
  constexpr int32_t kOther = 3072;  // barriers, and what CUDA keeps
  return std::min(32, (card.shared_bytes - kOther) / (stages * kBoxBytes));
}

// dW in so many strips, where their dy leaves room for so many columns of blocks of x.
struct Strips {
  int64_t strips, rows;  // of blocks, each
  int32_t dy_boxes;
  int64_t room;
};
std::optional<Strips> in_strips(const CudaProblem& p, int32_t boxes, int64_t strips) {
  const int64_t rows = divide_up(p.output_blocks(), strips);
  const int32_t dy_boxes = dy_boxes_of(rows, p.block);
  if (rows > kMostStripRows || dy_boxes > kMostDyBoxes || divide_up(p.output_blocks(), rows) != strips) return {};
  const int64_t room = (int64_t{boxes - dy_boxes} * 64 - std::max(64 - p.block, 0)) / p.block;
  if (room < 1 || divide_up(p.input_blocks(), room) > kMostStripJobs) return {};
  return Strips{.strips = strips, .rows = rows, .dy_boxes = dy_boxes, .room = room};
}

// Jobs with as many blocks are not equally wide. What is too wide for one goes to the next, for which it needs room.
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

// The best plan for so many stages, and its clocks.
Plan plan_stages(const CudaProblem& p, const cuda::Card& card, int32_t stages, double& least) {
  const int32_t boxes = boxes_of_stage(card, stages);
  const auto columns = static_cast<double>(p.input_blocks());
  const double most_jobs = std::min<double>(kMostStripJobs, columns), capacity = form_of(p.block).patches();
  const double grid = card.multiprocessors, steps = static_cast<double>(divide_up(p.n, kTokens));
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

// As few stages as there must be hold the widest jobs; one more is worth a tenth. Where strips may differ by much,
// their jobs differ in width by as much.
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
  // Also on the card with the least shared memory.
  const int32_t boxes = boxes_of_stage({}, kLeastStages);
  for (int64_t strips = 1; strips <= std::min<int64_t>(p.output_blocks(), kMostStrips); ++strips) {
    if (in_strips(p, boxes, strips)) return p.blocks < kMost / 4;
  }
  return false;
}

// us of bf16, H200, 2026-11-24, of wgrad_in_registers and of wgrad_wgmma:
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
// Without wgrad_wgmma (sm_80) there are wgrad_stream, of less than 2048 tokens, and generic besides; not measured.
//
// On an H100, 2026-11-25: 4096 x 4096, 2048 tokens, b = 32: .10 67, 58; .05 43, 38; .02 32, 36; 6144 x 6144, 8192
// tokens, .05 183, 219. 512 x 512, b = 16, .10, 4096 tokens 20, 25, 1024 tokens 18, 17 (wgrad_stream 10).
bool pays_beside_wgmma(const CudaProblem& p, const cuda::Card& card) {
  if (!card.sm90a) return p.n >= 1024;
  if (!wgrad_wgmma::supports(p)) return true;
  // A small dW has few patches for many thread blocks, each of which reads x and dy: 256 x 256, b = 16, 50,000 tokens
  // 422 us, wgrad_wgmma with as many patches 46.
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

// Also for the last of several launches, which has fewer tokens.
int64_t workspace_bytes(const CudaProblem& asked) {
  CudaProblem p = asked;
  p.n = std::min<int64_t>(p.n, std::numeric_limits<int32_t>::max());
  return supports(p) ? workspace_places(p).end : 0;
}

}  // namespace blocksparse::gemm::wgrad_in_registers
