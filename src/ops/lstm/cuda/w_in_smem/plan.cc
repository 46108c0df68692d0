#include "ops/lstm/cuda/w_in_smem/plan.h"

#include <algorithm>

#include "core/ceil_div.h"

namespace blocksparse::lstm {

WInSmemPlan plan_w_in_smem(const LayoutView& layout, DType dtype, int64_t steps, int64_t n, const cuda::Card& card) {
  constexpr int64_t kMost = int64_t{1} << 31;
  const int64_t hidden = layout.in_features, strips = hidden / kStripUnits, multiprocessors = card.multiprocessors;
  // If rows are cut, one is much longer than the others, and all would wait for it.
  if (!card.sm90a || size_of(dtype) != 2 || layout.block_size < kStripUnits || layout.cut_by_out) return {};
  if (steps < 2 || steps >= kMost / 64 || n < 1 || n > 32 * kMostGroups || strips < 1) return {};
  if (hidden >= kMost / 64 || layout.blocks * layout.block_size >= kMost) return {};
  WInSmemPlan plan;
  plan.grid = static_cast<int32_t>(std::min(strips, multiprocessors));
  plan.tokens = n <= 16 ? 16 : 32;
  plan.groups = n <= 32 ? 1 : 2;
  const int64_t most = ceil_div(strips, plan.grid);
  const int64_t on_chip = int64_t{plan.grid} * kMostChunks * kChunkBytes;
  const int64_t bytes = layout.blocks * layout.block_size * layout.block_size * 2;
  if (most > kMostStrips || most * kParts * plan.groups > kMostWarps || bytes > on_chip) return {};
  plan.strips = static_cast<int32_t>(most);
  return plan;
}

size_t w_in_smem_workspace_bytes(const LayoutView& layout) {
  return static_cast<size_t>(layout.in_features / kStripUnits) * kMostGroups * kFlagWords * sizeof(uint32_t);
}

}  // namespace blocksparse::lstm
