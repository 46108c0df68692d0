#include "gemm/cuda/wgrad_wgmma/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/ceil_div.h"
#include "core/places.h"
#include "gemm/cuda/wgrad_stream/plan.h"

namespace blocksparse::gemm::wgrad_wgmma {

namespace {

// A patch of 128 x 64 takes 2.3 times as long as one of 64 x 32. NOTES.md has both forms.
constexpr double kWidePatch = 2.3;

// How many patches have a block, if blocks are at random.
double random_patches(const CudaProblem& p, const Form& form) {
  const double empty = std::max(0.0, 1 - p.density());
  const auto patches =
      static_cast<double>(ceil_div(p.outputs, form.strip_outputs) * ceil_div(p.inputs, form.patch_inputs));
  return patches * (1 - std::pow(empty, form.ids));
}

}  // namespace

Form form_of(const CudaProblem& p) {
  const Form narrow = form_of(p.block, false), wide = form_of(p.block, true);
  return p.block <= 32 && kWidePatch * random_patches(p, wide) < random_patches(p, narrow) ? wide : narrow;
}

Plan plan_of(const CudaProblem& p, const Form& form) {
  Plan plan{};
  plan.strips = ceil_div(p.outputs, form.strip_outputs);
  // Whole blocks count: a block of 128 has both of its patches, even if the second lies beyond the edge.
  const int32_t step = std::max(p.block, form.patch_inputs);
  plan.chunks = ceil_div(p.inputs, step) * (step / form.patch_inputs);
  plan.patches = std::min(plan.strips * plan.chunks, p.blocks * std::max(1, p.block / form.patch_inputs));
  plan.jobs = plan.patches / (form.most_patches / 2) + plan.strips;  // half-filled jobs are twice as many
  return plan;
}

WorkspacePlaces workspace_places(const CudaProblem& p, const Form& form) {
  const Plan plan = plan_of(p, form);
  WorkspacePlaces at{};
  Places places;
  at.chunks = places.next(plan.patches * 4);
  at.ids = places.next(plan.patches * form.ids * 4);
  at.counts = places.next(plan.strips * 8);
  at.jobs = places.next(plan.jobs * 16);
  at.shares = places.next((kMostGrid + 2) * 8);
  at.parts = places.next(int64_t{2} * kMostGrid * form.part_bytes);
  at.gate_parts = places.next(p.blocks * std::max(1, p.block / 16) * (p.block / 8) * 4);
  at.end = places.end;
  return at;
}

bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (p.pass != Pass::wgrad || size_of(p.dtype) != 2 || p.inputs < 1 || p.outputs < 1) return false;
  if (p.n < wgmma::kLeastTokens || !p.x_in_rows || !p.w_aligned || p.pairs > kTermsOfLaunch) return false;
  if (p.blocks * p.block >= kMost || p.n >= kMost || p.outputs >= kMost) return false;
  const Plan plan = plan_of(p);
  return plan.chunks <= kMostChunks && plan.patches * form_of(p).ids < kMost && plan.strips <= kMostStrips;
}

// wgrad_stream/NOTES.md has times at 512 and 1024 tokens.
int64_t least_tokens(const CudaProblem& p) {
  const int64_t least = p.block == 128 ? 512 : 1024;  // b = 128 beats wgrad_stream sooner
  return p.pairs == 1 || p.block >= 32 ? least : least * p.pairs;
}

bool pays(const CudaProblem& p, const cuda::Card& card) { return !wgrad_stream::is_best(p, card); }

// The workspace serves the last of several launches too, which has fewer tokens.
int64_t workspace_bytes(const CudaProblem& asked) {
  CudaProblem p = asked;
  p.n = std::min<int64_t>(p.n, std::numeric_limits<int32_t>::max());
  return supports(p) ? workspace_places(p, form_of(p)).end : 0;
}

}  // namespace blocksparse::gemm::wgrad_wgmma
