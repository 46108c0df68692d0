// Types that the kernels of wgrad for many tokens share: see launch.cuh.
#pragma once

#include "core/ceil_div.h"
#include "gemm/cuda/gradient_target.cuh"
#include "gemm/cuda/wgmma/maps.cuh"
#include "gemm/cuda/wgrad_wgmma/jobs.h"
#include "gemm/cuda/wgrad_wgmma/terms.cuh"

namespace blocksparse::gemm::wgrad_wgmma {
namespace {

struct Args {
  Tables tables;
  GradientTarget target;
  const void* w;        // null unless the gates' gradients are wanted
  float* gate_parts;    // [blocks][b / 16][b / 8]; null unless they are wanted
  int32_t gate_blocks;  // blocks with a common gate, one behind the other
  float* dgates;
  int32_t block_shift;
  int32_t steps;  // of tokens
  int64_t outputs, inputs;
};

// Tensor maps of each (x, dy) of a list.
template <wgmma::XOrder Order, int Terms>
struct TermMaps {
  wgmma::XMap<Order> x[Terms];
  CUtensorMap dy[Terms];
  TermSteps<Terms> steps;
};

// B = 32 serves smaller blocks too, and B = 128 those whose form is wide. `Order` is that of x; dy has it too, but lies
// by tokens where x is gathered. `Terms` is the most (x, dy) of a launch. One alone has a kernel of its own, which
// spends no register of the feeding warps on the choice of a pair's maps: these warps bound wgrad.
template <class T, int B, wgmma::XOrder Order, int Terms = 1>
struct Kernel {
  using Element = T;
  using OfOne = Kernel<T, B, Order>;
  static constexpr bool wide = B == 128;
  static constexpr int kTerms = Terms;
  using Maps = TermMaps<Order, Terms>;
  static constexpr wgmma::XOrder order = Order;
  static constexpr bool first = Order == wgmma::XOrder::features;
  static constexpr Form form = form_of(B, wide);
  // Tokens of a step. A box costs as much as its bytes, up to where stages are too few: NOTES.md has both sizes.
  static constexpr int kTokens = first || B != 64 ? 64 : 32;
  static constexpr int kFeeders = 4;  // warps
  static constexpr int kPatch = form.patch_inputs, kPatches = form.most_patches, kDyBoxes = form.strip_outputs / 64;
  static constexpr int kDyBox = kTokens * 64 * 2, kXBox = kTokens * kPatch * 2;
  static constexpr int kStageBytes = kDyBoxes * kDyBox + kPatches * kXBox;
  static constexpr int kMostStages = 10;
  static constexpr int kStages = 220 * 1024 / kStageBytes > kMostStages ? kMostStages : 220 * 1024 / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kThreads = 384;
  static_assert(sizeof(Maps) + sizeof(Args) <= 4096, "a kernel's arguments");
};

using Sums = float[128];  // [64, 256] of a warpgroup

// The patches of a job that a warpgroup has.
template <class K>
struct PatchesOfGroup {
  int first, count;
  __device__ PatchesOfGroup(const Job& job, int group) {
    const int half = ceil_div(job.patches, 2);
    first = K::wide || group == 0 ? 0 : half;
    count = K::wide ? job.patches : group == 0 ? half : job.patches - half;
  }
};

}  // namespace
}  // namespace blocksparse::gemm::wgrad_wgmma
