// The plan of wgrad: what is packed, how many tokens at a time, how threads share the blocks.
#include <algorithm>

#include "core/ceil_div.h"
#include "core/text.h"
#include "cpu/threads.h"
#include "gemm/cpu/plan.h"

namespace blocksparse::gemm {

namespace {

constexpr int64_t kTokenGroup = 64;  // a round holds whole groups
constexpr size_t kAlignment = 64;

int64_t packed_features(const CpuGradientProblem& p) {
  return round_up(p.inputs, p.block) + round_up(p.outputs, p.block);
}

int64_t most_tokens(const CpuGradientProblem& p, int64_t sum_bytes) {
  return round_tokens(p.n, packed_features(p) * sum_bytes, kTokenGroup);
}

// Whether x and dy are read in place. With few blocks, packing every feature is most of the work. With many, packing
// pays, because rows a power of two apart share few sets of L1 and their blocks come from L2. Zen 3, b = 32, 64 tokens:
// in place is 1.17x as fast as packed at 2 %, 0.72x at 10 %. AVX-512 tolerates more blocks: Zen 5, b = 32, 10 % 81 us
// -> 71.
//
// More tokens are read 64 at a time, and each turn is added to dW: 512 tokens, b = 32, 10 %, from memory 790 us -> 602.
// A large dW would come and go each time: 6.7 MB (4096 x 4096, 10 %) 11.4 ms -> 14.9.
bool reads_in_place(const CpuGradientProblem& p, int64_t sum_bytes) {
  constexpr int64_t kMostBytes = 2 << 20;  // dW, in bytes
  const int64_t b = p.block, vector_bytes = p.lanes * sum_bytes;
  if (p.n == 0 || p.pairs != 1 || size_of(p.dtype) != sum_bytes) return false;
  if (p.n > kInPlaceTokens && (vector_bytes < 64 || p.blocks * b * b * sum_bytes >= kMostBytes)) return false;
  if (p.x_feature != 1 || p.dy_feature != 1) return false;
  if (p.inputs % b != 0 || p.outputs % b != 0) return false;
  const int64_t panels = (p.inputs + p.outputs) / b;
  return vector_bytes >= 64 ? p.blocks <= 8 * panels : 2 * p.blocks <= panels;
}

// Whether features-first dy is read in place. Zen 5, 1024 x 1024, 64 tokens, b = 32, 2 %, in cache: 23 us -> 14.
// Features-last dy in place beside packed x loses: 65 us -> 72.
bool reads_dy_in_place(const CpuGradientProblem& p, int64_t sum_bytes) {
  if (p.pairs != 1 || size_of(p.dtype) != sum_bytes) return false;
  return p.dy_token == 1 && p.dy_feature != 1 && p.outputs % p.block == 0;
}

GradientForm form_of(const CpuGradientProblem& p, int64_t sum_bytes) {
  if (reads_in_place(p, sum_bytes)) return GradientForm::in_place;
  return reads_dy_in_place(p, sum_bytes) ? GradientForm::dy_in_place : GradientForm::packed;
}

// Whether dy of each row of blocks is copied. Rows of dy 4 KB apart lie in few sets of L1. Xeon (Emerald Rapids), 64
// tokens, b = 32, 10 %: 94 us -> 88. It was not measured on AMD's CPUs; Zen 5 waits less for L2.
bool copies_dy(GradientForm form, int64_t vector_bytes, const Cpu& cpu) {
  return form == GradientForm::in_place && cpu.intel && vector_bytes == 64;
}

// The number of tokens to sum at a time. With 32 KB of L1 and 512 KB of L2 it pays to add a few tokens to dW each time,
// except for small blocks. Zen 3, 1024 x 1024, 512 tokens, from memory: b = 32, 10 % 1810 us -> 1510, but b = 8 1650 us
// -> 1800.
int64_t tokens_at_a_time(const CpuGradientProblem& p, int64_t most, int64_t sum_bytes) {
  constexpr int64_t kTokens = 64;
  const bool wide = size_of(p.dw_dtype) == sum_bytes;
  if (p.lanes * sum_bytes != 32 || p.block < 32 || !wide || p.pairs == 0) return most;
  return p.x_feature == 1 && p.dy_feature == 1 ? std::min(most, kTokens) : most;
}

// Sets the sizes in bytes of the workspace's parts. Whole blocks of features are packed.
void measure(const CpuGradientProblem& p, int64_t sum_bytes, CpuGradientPlan& plan) {
  const bool narrow = size_of(p.dw_dtype) != sum_bytes;
  plan.panel_bytes = static_cast<size_t>(plan.round * packed_features(p) * sum_bytes);
  if (narrow && p.n > plan.round) plan.sums_bytes = static_cast<size_t>(p.blocks * p.block * p.block * sum_bytes);
}

}  // namespace

CpuGradientProblem problem_of(const WeightGradient& g, int lanes, int32_t threads) {
  CpuGradientProblem p{.dtype = g.dtype,
                       .dw_dtype = g.dw_dtype,
                       .block = g.layout.block_size,
                       .inputs = g.layout.in_features,
                       .outputs = g.layout.out_features,
                       .blocks = g.layout.blocks,
                       .pairs = static_cast<int64_t>(g.pairs.size()),
                       .threads = threads,
                       .lanes = lanes};
  for (size_t i = 0; i < g.pairs.size(); ++i) {
    const GradTerm term = g.term(i);
    p.n += term.x.n;
    if (i > 0) continue;
    p.x_feature = term.x.feature_stride;
    p.dy_feature = term.dy.feature_stride;
    p.dy_token = term.dy.token_stride;
  }
  return p;
}

CpuGradientPlan plan_gradient(const CpuGradientProblem& p, const Cpu& cpu) {
  constexpr int64_t kTaskBytes = 64 << 10;  // sums that one task makes, in bytes: small enough to share well
  const int64_t sum_bytes = size_of(sum_dtype(p.dtype)), block_bytes = int64_t{p.block} * p.block * sum_bytes;
  CpuGradientPlan plan{.form = form_of(p, sum_bytes)};
  plan.copies_dy = copies_dy(plan.form, p.lanes * sum_bytes, cpu);
  plan.threads = worthwhile_threads(p.threads, 2.0 * static_cast<double>(p.n) * static_cast<double>(p.blocks) *
                                                   static_cast<double>(p.block * p.block));
  plan.task_blocks = std::max<int64_t>(1, plan.threads == 1 ? p.blocks : kTaskBytes / block_bytes);
  if (plan.form == GradientForm::in_place) {
    plan.round = kInPlaceTokens;
    return plan;
  }
  plan.round = tokens_at_a_time(p, most_tokens(p, sum_bytes), sum_bytes);
  measure(p, sum_bytes, plan);
  return plan;
}

size_t CpuGradientPlan::workspace_bytes() const { return panel_bytes + sums_bytes + 2 * kAlignment; }

size_t cpu_workspace_bytes(const CpuGradientProblem& p) {
  const int64_t sum_bytes = size_of(sum_dtype(p.dtype));
  CpuGradientPlan most{.round = most_tokens(p, sum_bytes)};
  measure(p, sum_bytes, most);
  return most.workspace_bytes();
}

namespace {

std::string_view name_of(GradientForm form) {
  switch (form) {
    case GradientForm::packed: return "packed";
    case GradientForm::dy_in_place: return "dy_in_place";
    case GradientForm::in_place: return "in_place";
  }
  return "unknown";
}

}  // namespace

std::string to_string(const CpuGradientPlan& plan) {
  return concat(name_of(plan.form), plan.copies_dy ? " copies_dy" : "", plan.sums_bytes > 0 ? " wide_sums" : "",
                " threads=", plan.threads, " workspace=", plan.workspace_bytes(), " round=", plan.round,
                " task_blocks=", plan.task_blocks);
}

std::string cpu_choice(const WeightGradient& g, Isa isa, int32_t threads) {
  const GradientKernel* kernel = find_gradient_kernel(isa, g.dtype);
  return kernel == nullptr ? "" : to_string(plan_gradient(problem_of(g, kernel->lanes, threads), this_cpu()));
}

}  // namespace blocksparse::gemm
