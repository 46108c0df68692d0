// What the kernels of wgrad for many tokens are about: see cuda_many_gradient.h.
#pragma once

#include "gemm/cuda/gradient_target.cuh"
#include "gemm/cuda/wgmma/maps.cuh"
#include "gemm/cuda/wgrad_wgmma/terms.cuh"
#include "gemm/cuda/wgrad_wgmma/units.h"

namespace blocksparse::gemm {
namespace {

struct ManyGradient {
  GradientTables tables;
  GradientTarget target;
  const void* w;        // if the gates' gradients are wanted
  float* gate_parts;    // [blocks][b / 16][b / 8]; null: they are not
  int32_t gate_blocks;  // that have a gate in common, one behind the other
  float* dgates;
  int32_t block_shift;
  int32_t steps;  // of tokens
  int64_t outputs, inputs;
};

// Of each (x, dy) of a list.
template <XOrder Order, int Terms>
struct GradientMaps {
  ManyX<Order> x[Terms];
  CUtensorMap dy[Terms];
  TermSteps<Terms> steps;
};

// B = 32 serves smaller blocks too, and B = 128 those whose form is wide. Order: of x; that of dy is the same, or by
// tokens where x is gathered. Terms: the (x, dy) of a launch, at most. One alone has a kernel of its own: there, which
// pair's maps are used takes no register of the feeding warps, by which wgrad is bound.
template <class T, int B, XOrder Order, int Terms = 1>
struct GradientKernel {
  using Element = T;
  using OfOne = GradientKernel<T, B, Order>;
  static constexpr bool wide = B == 128;
  static constexpr int kTerms = Terms;
  using Maps = GradientMaps<Order, Terms>;
  static constexpr XOrder order = Order;
  static constexpr bool first = Order == XOrder::features;
  static constexpr ManyGradientForm form = gradient_form_of(B, wide);
  // Of a step: a box costs as much as its bytes do. b = 128, .25, 14336 x 4096, n = 8192: 64 tokens 408 us, 32 435 (one
  // feeding warp: 408, 524); b = 64, whose stages would be three of 72 KB: 559, 517.
  static constexpr int kTokens = first || B != 64 ? 64 : 32;
  static constexpr int kFeeders = 4;  // warps
  static constexpr int kCell = form.cell_inputs, kCells = form.most_cells, kDyBoxes = form.strip_outputs / 64;
  static constexpr int kDyBox = kTokens * 64 * 2, kXBox = kTokens * kCell * 2;
  static constexpr int kStageBytes = kDyBoxes * kDyBox + kCells * kXBox;
  static constexpr int kMostStages = 10;
  static constexpr int kStages = 220 * 1024 / kStageBytes > kMostStages ? kMostStages : 220 * 1024 / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kThreads = 384;
  static_assert(sizeof(Maps) + sizeof(ManyGradient) <= 4096, "a kernel's arguments");
};

using GradientSums = float[128];  // [64, 256] of a warpgroup

// Which cells of a unit are a warpgroup's.
template <class K>
struct CellsOfGroup {
  int first, count;
  __device__ CellsOfGroup(const GradientUnit& unit, int group) {
    const int half = (unit.cells + 1) / 2;
    first = K::wide || group == 0 ? 0 : half;
    count = K::wide ? unit.cells : group == 0 ? half : unit.cells - half;
  }
};

}  // namespace
}  // namespace blocksparse::gemm
