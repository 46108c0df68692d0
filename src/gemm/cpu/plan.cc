#include "gemm/cpu/plan.h"

#include <algorithm>

#include "core/ceil_div.h"
#include "core/text.h"
#include "cpu/threads.h"

namespace blocksparse::gemm {

namespace {

constexpr int64_t kMostLanes = 16;        // f32 in 64 bytes: tokens are padded to whole vectors of any instruction set
constexpr int64_t kRoundBytes = 8 << 20;  // packed activations of a round, which stay in the last-level cache
constexpr int64_t kGroupBytes = 256;      // tokens of a group, in the type of sums
constexpr int64_t kMostRowBytes = 8 << 10;  // the largest row of x that is read in place
constexpr size_t kAlignment = 64;

// A problem, and sizes that several choices need.
struct Sizes {
  const CpuProblem& p;
  int64_t sum_bytes = size_of(sum_dtype(p.dtype));
  int64_t vector_bytes = p.kernel.lanes * sum_bytes;
  int64_t usual_group = kGroupBytes / sum_bytes;  // tokens
  int64_t x_bytes = p.inputs * size_of(p.dtype);  // of a token
  int64_t weights = p.weights();

  bool one_vector() const { return p.block * sum_bytes == vector_bytes; }
};

// Features-first x is packed where the kernel's tiles read vectors side by side (AVX2), rows of x are more than
// kSideBySideApart bytes apart, and an input meets more than kSideBySideOutputs outputs. A tile then reads one stream,
// which pays for the copy. Zen 3, 64 tokens: 8 % faster at 4096 x 4096, 10 %, but 1 to 5 % slower at 1024 x 1024, 10 %.
constexpr int64_t kSideBySideApart = 128, kSideBySideOutputs = 300;

// Rows of x a large power of two apart share few sets of the cache, so they are packed. Rows up to 512 bytes apart are
// as good as packed ones.
bool reads_features_in_place(const Sizes& s) {
  const CpuProblem& p = s.p;
  const int64_t apart = p.x_feature * s.sum_bytes;
  if (p.kernel.side_by_side && apart > kSideBySideApart && s.weights > kSideBySideOutputs * p.inputs) return false;
  return size_of(p.dtype) == s.sum_bytes && p.x_feature != 1 && (apart <= 512 || apart % 1024 != 0);
}

// Whether sums wait until those of their rows of y are complete, if y is features-last. Blocks of a line or less would
// write each line of y in turns, and rows of y are often a power of two apart, so that no line stays in L1. Zen 5, 64
// tokens, 10 %: b = 8 138 us -> 96. b = 64 does not wait: 83 us -> 89.
bool sums_wait(const CpuProblem& p) {
  const int64_t row = p.block * size_of(p.dtype);
  return row <= (size_of(p.dtype) == size_of(sum_dtype(p.dtype)) ? 128 : 32);
}

// The number of tokens that vectors along outputs do at a time: x of a group stays in L2 beside W. Zen 5, 512 tokens,
// fprop, b = 32, 50 %: 64 -> 128 tokens 3046 us -> 2571.
int64_t group_along_outputs(int64_t token_bytes) {
  constexpr int64_t kBytes = 512 << 10;
  return token_bytes * kGroupAlongOutputs <= kBytes ? kGroupAlongOutputs : kGroupAlongOutputs / 2;
}

// Whether vectors run along outputs. fprop copies W for each group of tokens; packing x and transposing y costs about
// as much for each element. Zen 5, 64 tokens, 50 %: even at 1024 x 1024, but 1.10 ms -> 1.18 at 4096 x 4096, 10 %.
//
// Blocks of one vector need a load for each product. Intel's CPUs do that at full speed: Xeon (Emerald Rapids), dgrad,
// b = 16, 10 % 121 us -> 91. AMD's do not: Zen 5 79 us -> 138, in a loop without constant addresses.
bool runs_along_outputs(const Sizes& s, const Cpu& cpu) {
  constexpr int64_t kFewest = 16;  // tokens
  const CpuProblem& p = s.p;
  if (s.one_vector() && !cpu.intel) return false;
  if (p.kernel.along_outputs == 0 || p.block < p.kernel.along_outputs || p.n < kFewest || p.gated) return false;
  if (p.x_feature != 1 || p.y_feature != 1) return false;
  if (p.dtype == DType::bf16 && p.inputs % 2 != 0) return false;  // pairs of inputs
  // dgrad reads rows of W in place, or copies pairs of them, which both forms do. Rows of x of 16 KB are better packed:
  // 4096 x 4096, b = 32, 10 %, 512 tokens 9.0 ms -> 10.7. On Intel's CPUs they are not: x, its panels, waiting sums and
  // y (4 MB for 64 tokens) leave 2 MB of L2, and a Xeon takes 13.8 ms -> 12.1.
  const bool large_rows = cpu.intel && s.vector_bytes == 64 && p.dtype == DType::f32;
  if (p.by_in) return large_rows || s.x_bytes <= kMostRowBytes;
  const int64_t copied = s.weights * ceil_div(p.n, group_along_outputs(s.x_bytes));
  return 2 * copied <= 5 * p.n * (p.inputs + p.outputs);
}

// Whether vectors along outputs read a copy of x. Rows of x are often 4 KB apart, so a block of all tokens lies in few
// sets of 32 KB of L1. The copy must be used by enough outputs. Zen 3, 64 tokens: b = 16, 10 % 7 % faster; b = 32, 2 %
// 17 to 20 % slower.
//
// AVX-512 always copies for blocks of one vector, whose addresses are then constants, and for large rows in dgrad: 16
// KB a row, 512 tokens, Xeon 13.3 ms -> 12.6.
bool packs_tokens(const Sizes& s) {
  const CpuProblem& p = s.p;
  if (s.vector_bytes == 64) {
    const bool large_rows = p.by_in && s.x_bytes > kMostRowBytes;
    return p.dtype == DType::f32 && (s.one_vector() || large_rows);
  }
  constexpr int64_t kFewestOutputs = 64, kFewTokensOfLarge = 64;
  return s.weights > kFewestOutputs * p.inputs && (p.block < 32 || p.n > kFewTokensOfLarge);
}

// One token is left to vectors along features even if the kernel sums by tiles. From two tokens on AMX is faster as a
// tile of 16: 4 tokens, b = 32, 10 % 24 us -> 8.
ProductForm form_of(const Sizes& s, const Cpu& cpu) {
  const CpuProblem& p = s.p;
  if (p.n <= kUnpackedTokens && p.x_feature == 1 && (p.n == 1 || !p.kernel.by_token)) return ProductForm::few_tokens;
  if (p.kernel.by_token) return ProductForm::tiles;
  return runs_along_outputs(s, cpu) ? ProductForm::along_outputs : ProductForm::tokens_as_vectors;
}

bool packs(const Sizes& s, ProductForm form) {
  switch (form) {
    case ProductForm::few_tokens: return false;
    case ProductForm::tokens_as_vectors: return !reads_features_in_place(s);
    case ProductForm::along_outputs: return packs_tokens(s);
    case ProductForm::tiles: break;
  }
  return true;
}

// Whether dgrad asks for a block of 8 once more just before its use. What came 16 KB before has left L1: Zen 5, 10 % 5
// % faster. Not on Intel's CPUs: Xeon (Emerald Rapids), features-first, 10 % 86 us -> 99.
bool asks_again(const CpuProblem& p, ProductForm form, const Cpu& cpu) {
  const bool copied = p.dtype != DType::f32 || p.gated;  // W, with its gate
  return form == ProductForm::tokens_as_vectors && p.by_in && p.block == 8 && !copied && !cpu.intel;
}

// One token: the hardware prefetches large blocks of W by itself. Xeon (Emerald Rapids), 1024 x 1024, 10 %, fprop, b =
// 32, in cache, without asking: 7.8 us -> 5.5. Blocks of 16 are still asked for: from memory they would take 35 us
// instead of 27.
bool leaves_large_unasked(const Sizes& s, ProductForm form, const Cpu& cpu) {
  return form == ProductForm::few_tokens && s.p.n == 1 && s.p.block >= 32 && cpu.intel && s.vector_bytes == 64;
}

// dgrad by AMX copies a chunk of W once for a group of tokens, so larger groups copy less. Xeon with AMX, bf16, 512
// tokens: 64 -> 128 tokens takes dgrad of 4096 x 4096, b = 32, 10 % from 3.97 ms to 2.90. Short lists lose: b = 32 with
// three blocks a row 232 us -> 279.
int64_t group_of_tiles(const Sizes& s, int64_t round) {
  constexpr int64_t kLarge = 128, kUsual = 64, kLongList = 192;  // inputs that an output has
  const bool pays = s.p.block >= 64 || (s.p.block == 32 && s.weights >= kLongList * s.p.outputs);
  return round >= kLarge && pays ? kLarge : kUsual;
}

int64_t group_of(const Sizes& s, const CpuPlan& plan) {
  switch (plan.form) {
    case ProductForm::along_outputs: return group_along_outputs(s.x_bytes);
    case ProductForm::tiles: return group_of_tiles(s, plan.round);
    case ProductForm::few_tokens:
    case ProductForm::tokens_as_vectors: break;
  }
  return s.usual_group;
}

// The number of tokens that a thread does by itself at a time. 0: threads share the pieces of a group; they then read x
// that others packed and write lines of y that others wrote in the call before, all through the last-level cache. Zen
// 5, 2 threads, 64 tokens, b = 32, 10 %, from memory: shared 69 us, by group 55. Half a group loses where x is read in
// place: 40 us -> 48.
int64_t group_of_thread(const Sizes& s, const CpuPlan& plan, int64_t usual, int64_t tokens) {
  constexpr int64_t kInOneCache = 1 << 20;  // bytes of weights that every thread may as well read
  const bool halves = plan.form == ProductForm::tokens_as_vectors && plan.packed;
  const int64_t smallest = plan.form == ProductForm::tiles ? s.usual_group : halves ? usual / 2 : usual;
  for (int64_t group = usual; group >= smallest; group /= 2) {
    const int64_t groups = ceil_div(tokens, group);
    if (group < usual && s.weights * size_of(s.p.dtype) > kInOneCache) break;
    if (groups % plan.threads == 0 || groups >= 4 * plan.threads) return group;
  }
  return 0;
}

RoundPlan plan_round(const Sizes& s, const CpuPlan& plan, int64_t usual, int64_t tokens) {
  const int64_t group = group_of_thread(s, plan, usual, tokens);
  const bool waits = plan.staged_tokens > 0, fits = !waits || plan.threads == 1 || tokens <= plan.staged_tokens;
  RoundPlan round{.group = usual};
  if (group > 0 && fits) round = {.group = group, .by_group = true};
  if (waits) round.staged = round.by_group && plan.threads > 1 ? plan.staged_tokens : s.usual_group;
  return round;
}

// The number of tokens whose waiting sums have room, in rounds like those of packed x.
int64_t staged_tokens(const Sizes& s) {
  const int64_t token_bytes = round_up(s.p.outputs, kStagedOutputs) * s.sum_bytes;
  return std::max(s.usual_group, round_tokens(s.p.n, token_bytes, s.usual_group));
}

size_t panel_bytes(const Sizes& s, int64_t tokens) {
  return static_cast<size_t>(tokens * round_up(s.p.inputs, s.p.block) * s.sum_bytes);
}

// Sets the sizes in bytes of the workspace's parts.
void measure(const Sizes& s, CpuPlan& plan) {
  const bool some = plan.packed || plan.form == ProductForm::tokens_as_vectors;  // otherwise nothing is packed
  plan.panel_bytes = some ? panel_bytes(s, plan.packed ? plan.round : std::min(plan.round, kMostLanes)) : 0;
  plan.partial_bytes = static_cast<size_t>(s.p.slots * plan.round * s.p.block * s.sum_bytes);
  plan.staged_bytes = static_cast<size_t>(plan.staged_tokens * round_up(s.p.outputs, kStagedOutputs) * s.sum_bytes);
}

}  // namespace

int64_t round_tokens(int64_t n, int64_t bytes_per_token, int64_t group) {
  const int64_t fitting = kRoundBytes / std::max<int64_t>(1, bytes_per_token) / group * group;
  return std::min(round_up(n, kMostLanes), std::clamp(fitting, group, kMostRoundTokens));
}

ProductTraits traits_of(const ProductKernel& kernel) {
  return {.lanes = kernel.lanes,
          .by_token = kernel.by_token,
          .side_by_side = kernel.side_by_side,
          .stages = kernel.finish_staged != nullptr,
          .along_outputs = kernel.along_outputs};
}

CpuProblem problem_of(const Product& p, const ProductTraits& kernel, int64_t slots, int32_t threads) {
  return {.dtype = p.dtype,
          .block = p.layout.block_size,
          .by_in = p.by_in,
          .n = p.x.n,
          .inputs = p.x.features,
          .outputs = p.outputs(),
          .blocks = p.layout.blocks,
          .slots = slots,
          .gated = p.gates != nullptr,
          .x_feature = p.x.feature_stride,
          .y_feature = p.y.feature_stride,
          .y_token = p.y.token_stride,
          .threads = threads,
          .kernel = kernel};
}

CpuPlan plan_product(const CpuProblem& p, const Cpu& cpu) {
  const Sizes s{p};
  CpuPlan plan{.form = form_of(s, cpu)};
  plan.packed = packs(s, plan.form);
  plan.asks_again = asks_again(p, plan.form, cpu);
  plan.large_unasked = leaves_large_unasked(s, plan.form, cpu);
  plan.threads = worthwhile_threads(p.threads, 2.0 * static_cast<double>(p.n) * static_cast<double>(s.weights));
  plan.round = round_tokens(p.n, p.inputs * s.sum_bytes, s.usual_group);
  if (plan.form == ProductForm::tokens_as_vectors && sums_wait(p) && p.kernel.stages && p.y_feature == 1 &&
      p.y_token != 1) {
    plan.staged_tokens = staged_tokens(s);
  }
  const int64_t group = group_of(s, plan);
  // One thread packs each group where the last one was, in its cache: 512 tokens are 2 to 4 % faster on Zen 5.
  plan.panel_tokens = plan.threads > 1 ? plan.round : std::min(plan.round, std::max(s.usual_group, group));
  plan.whole = plan.last = plan_round(s, plan, group, std::min(p.n, plan.round));
  if (p.n > plan.round && p.n % plan.round != 0) plan.last = plan_round(s, plan, group, p.n % plan.round);
  measure(s, plan);
  return plan;
}

size_t CpuPlan::workspace_bytes() const { return panel_bytes + partial_bytes + staged_bytes + 3 * kAlignment; }

size_t cpu_workspace_bytes(const CpuProblem& p) {
  const Sizes s{p};
  CpuPlan most{.packed = true, .round = round_tokens(p.n, p.inputs * s.sum_bytes, s.usual_group)};
  if (sums_wait(p)) most.staged_tokens = staged_tokens(s);
  measure(s, most);
  return most.workspace_bytes();
}

namespace {

std::string_view name_of(ProductForm form) {
  switch (form) {
    case ProductForm::few_tokens: return "few_tokens";
    case ProductForm::tokens_as_vectors: return "tokens_as_vectors";
    case ProductForm::along_outputs: return "along_outputs";
    case ProductForm::tiles: return "tiles";
  }
  return "unknown";
}

std::string text_of(const RoundPlan& round) {
  return concat("group=", round.group, round.by_group ? " by_group" : " by_piece",
                round.staged > 0 ? concat(" staged=", round.staged) : "");
}

}  // namespace

std::string to_string(const CpuPlan& plan) {
  std::string text = concat(name_of(plan.form), plan.packed ? " x=packed" : " x=in_place");
  if (plan.packed) text += concat(" panel=", plan.panel_tokens);
  if (plan.asks_again) text += " asks_again";
  if (plan.large_unasked) text += " large_unasked";
  text += concat(" threads=", plan.threads, " workspace=", plan.workspace_bytes());
  if (plan.form == ProductForm::few_tokens) return text;
  const std::string whole = text_of(plan.whole), last = text_of(plan.last);
  return text + concat(" round=", plan.round, " ", whole, last == whole ? "" : concat(" last: ", last));
}

std::string cpu_choice(const Product& p, Isa isa, int32_t threads) {
  const ProductKernel* kernel = find_product_kernel(isa, p.dtype);
  if (kernel == nullptr) return "";
  const int64_t slots = walk_of(p.layout, p.by_in).slots;
  return to_string(plan_product(problem_of(p, traits_of(*kernel), slots, threads), this_cpu()));
}

}  // namespace blocksparse::gemm
