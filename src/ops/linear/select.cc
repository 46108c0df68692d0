#include "ops/linear/select.h"

#include <algorithm>

#include "ops/linear/kernels.h"

namespace blocksparse::linear {

namespace {

constexpr int64_t kMostLanes = 16;        // f32 in 64 bytes: tokens are padded to whole vectors of any instruction set
constexpr int64_t kRoundTokens = 1024;    // enough tasks for any number of threads
constexpr int64_t kRoundBytes = 8 << 20;  // of packed activations: they stay in the last-level cache
constexpr size_t kAlignment = 64;

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Tokens of a round: as many as fit into kRoundBytes, in whole groups, but no more than there are.
int64_t round_tokens(int64_t n, int64_t bytes_per_token, int64_t group) {
  const int64_t fitting = kRoundBytes / std::max<int64_t>(1, bytes_per_token) / group * group;
  return std::min(round_up(n, kMostLanes), std::clamp(fitting, group, kRoundTokens));
}

// Rows of x at a large power of two apart fall into few sets of the cache, so they are packed. Up to 512 bytes apart
// they are as good as packed.
bool reads_in_place(const Problem& p, int64_t sum_bytes) {
  const int64_t apart = p.x_feature_stride * sum_bytes;
  return size_of(p.dtype) == sum_bytes && p.x_features_first && (apart <= 512 || apart % 1024 != 0);
}

}  // namespace

int32_t worthwhile_threads(int32_t threads, double flops) {
  constexpr double kFlopsEach = 5e5;  // 10 us at 50 GFLOP/s
  return static_cast<int32_t>(std::clamp(flops / kFlopsEach, 1.0, static_cast<double>(std::max(threads, 1))));
}

ProductPlan plan_product(const Problem& p) {
  const int64_t sum_bytes = size_of(sum_dtype(p.dtype));
  ProductPlan plan;
  plan.group = 256 / sum_bytes;
  plan.few = p.n <= kFewTokens && p.x_feature_stride == 1;
  plan.direct = reads_in_place(p, sum_bytes);
  plan.round = round_tokens(p.n, p.inputs * sum_bytes, plan.group);
  const int64_t features = size_of(p.dtype) < sum_bytes ? round_up(p.inputs, p.block) : p.inputs;  // amx: whole blocks
  plan.panel_bytes = static_cast<size_t>((plan.direct ? kMostLanes : plan.round) * features * sum_bytes);
  plan.partial_bytes = static_cast<size_t>(p.slots * plan.round * p.block * sum_bytes);
  return plan;
}

size_t ProductPlan::workspace_bytes() const { return panel_bytes + partial_bytes + 2 * kAlignment; }

GradientPlan plan_gradient(const Problem& p, DType dw_dtype, int64_t blocks) {
  const int64_t sum_bytes = size_of(sum_dtype(p.dtype));
  // Whole blocks of features are packed.
  const int64_t features = round_up(p.inputs, p.block) + round_up(p.outputs, p.block);
  GradientPlan plan;
  plan.round = round_tokens(p.n, features * sum_bytes, 64);
  plan.panel_bytes = static_cast<size_t>(plan.round * features * sum_bytes);
  if (size_of(dw_dtype) != sum_bytes && p.n > plan.round) {
    plan.sums_bytes = static_cast<size_t>(blocks * p.block * p.block * sum_bytes);
  }
  return plan;
}

// Where there are few blocks, packing every feature is most of the work. Rows a power of two apart share few sets of
// L1, so that blocks come from L2 then. 1024 x 1024, 64 tokens, Zen 3, b = 32: at 2 % 1.17x faster than packed (b = 64:
// 1.11x), at 10 % 0.72x.
bool reads_tokens_in_place(const WeightGradient& g) {
  constexpr int64_t kMostTokens = 64;
  const int64_t b = g.layout.block_size;
  if (g.pairs.size() != 1 || size_of(g.dtype) != size_of(sum_dtype(g.dtype))) return false;
  const GradTerm term = g.term(0);
  if (term.x.n > kMostTokens || term.x.feature_stride != 1 || term.dy.feature_stride != 1) return false;
  if (g.layout.in_features % b != 0 || g.layout.out_features % b != 0) return false;
  const int64_t panels = (g.layout.in_features + g.layout.out_features) / b;
  return 2 * g.layout.blocks <= panels;
}

size_t GradientPlan::workspace_bytes() const { return panel_bytes + sums_bytes + 2 * kAlignment; }

}  // namespace blocksparse::linear
