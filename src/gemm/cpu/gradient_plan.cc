// The plan of wgrad.
#include <algorithm>

#include "core/ceil_div.h"
#include "core/text.h"
#include "cpu/threads.h"
#include "gemm/cpu/plan.h"

namespace blocksparse::gemm {

namespace {

constexpr int64_t kTokenGroup = 64;  // a round holds whole ones
constexpr size_t kAlignment = 64;

int64_t packed_features(const CpuGradientProblem& p) {
  return round_up(p.inputs, p.block) + round_up(p.outputs, p.block);
}

int64_t most_tokens(const CpuGradientProblem& p, int64_t sum_bytes) {
  return round_tokens(p.n, packed_features(p) * sum_bytes, kTokenGroup);
}

// Whether x and dy are read where they lie. Where there are few blocks, packing every feature is most of the work. Rows
// a power of two apart share few sets of L1, so that blocks come from L2 then. 1024 x 1024, 64 tokens, Zen 3, b = 32:
// at 2 % 1.17x faster than packed (b = 64: 1.11x), at 10 % 0.72x. AVX-512 on Zen 5, at 10 %: b = 8 114 us to 98, 16 87
// to 72, 32 81 to 71, 64 76 to 71; at 50 % even. More tokens are read in turns of 64, each added to dW: 512 tokens, b =
// 8, 16, 32 at 10 % from memory 1379 us to 815, 855 to 727, 790 to 602; b = 32 at 2 % 309 to 138; at 50 % even; 4096 x
// 4096, whose dW of 6.7 MB would come and go each time, at 10 % 11.4 ms to 14.9, at 2 % 4.2 to 3.2.
bool reads_in_place(const CpuGradientProblem& p, int64_t sum_bytes) {
  constexpr int64_t kMostBytes = 2 << 20;  // of dW
  const int64_t b = p.block, vector_bytes = p.lanes * sum_bytes;
  if (p.n == 0 || p.pairs != 1 || size_of(p.dtype) != sum_bytes) return false;
  if (p.n > kInPlaceTokens && (vector_bytes < 64 || p.blocks * b * b * sum_bytes >= kMostBytes)) return false;
  if (p.x_feature != 1 || p.dy_feature != 1) return false;
  if (p.inputs % b != 0 || p.outputs % b != 0) return false;
  const int64_t panels = (p.inputs + p.outputs) / b;
  return vector_bytes >= 64 ? p.blocks <= 8 * panels : 2 * p.blocks <= panels;
}

// Whether features-first dy is read where it lies. Zen 5, 1024 x 1024, 64 tokens, b = 32, with blocks of x that no
// block of W meets left out, in cache, at 2, 10, 50 %: 23 us to 14, 71 to 64, 317 to 297; b = 64, 2 %: 23 to 13; 512
// tokens, b = 32, 10 % 611 to 490. Features-last dy that is read so, beside packed x: 65 to 72.
bool reads_dy_in_place(const CpuGradientProblem& p, int64_t sum_bytes) {
  if (p.pairs != 1 || size_of(p.dtype) != sum_bytes) return false;
  return p.dy_token == 1 && p.dy_feature != 1 && p.outputs % p.block == 0;
}

GradientForm form_of(const CpuGradientProblem& p, int64_t sum_bytes) {
  if (reads_in_place(p, sum_bytes)) return GradientForm::in_place;
  return reads_dy_in_place(p, sum_bytes) ? GradientForm::dy_in_place : GradientForm::packed;
}

// Whether dy of each row of blocks is copied. Rows of dy 4 KB apart lie in few sets of L1. Xeon (Emerald Rapids), N =
// 64, 10 %, b = 8, 16, 32, 64 128 us to 122, 97 to 93, 94 to 88, 95 to 89; N = 512, b = 32 859 to 802. AMD's were not
// measured: Zen 5 waits less for L2.
bool copies_dy(GradientForm form, int64_t vector_bytes, const Cpu& cpu) {
  return form == GradientForm::in_place && cpu.intel && vector_bytes == 64;
}

// With 32 KB of L1 and 512 KB of L2 a few tokens at a time are worth adding to dW each time, but for small blocks. Zen
// 3, 1024 x 1024, 512 tokens from memory: b = 32 at 2, 10, 50 % 497 us to 410, 1810 to 1510, 7860 to 6360, b = 64 at 10
// % 1820 to 1500; 4096 x 4096, b = 32, 10 % 24.9 ms to 22.0; b = 16 1550 to 1610, b = 8 1650 to 1800. Features-first, b
// = 32 1420 to 1470.
int64_t tokens_at_a_time(const CpuGradientProblem& p, int64_t most, int64_t sum_bytes) {
  constexpr int64_t kTokens = 64;
  const bool wide = size_of(p.dw_dtype) == sum_bytes;
  if (p.lanes * sum_bytes != 32 || p.block < 32 || !wide || p.pairs == 0) return most;
  return p.x_feature == 1 && p.dy_feature == 1 ? std::min(most, kTokens) : most;
}

// Sets how many bytes its parts of a workspace have. Whole blocks of features are packed.
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
  constexpr int64_t kTaskBytes = 64 << 10;  // of sums that one task makes: small enough to share well
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
