#include "gemm/cpu/plan.h"

#include <algorithm>

#include "core/ceil_div.h"
#include "core/text.h"
#include "cpu/threads.h"

namespace blocksparse::gemm {

namespace {

constexpr int64_t kMostLanes = 16;        // f32 in 64 bytes: tokens are padded to whole vectors of any instruction set
constexpr int64_t kRoundBytes = 8 << 20;  // of packed activations: they stay in the last-level cache
constexpr int64_t kGroupBytes = 256;      // tokens of a group in the type of sums
constexpr int64_t kMostRowBytes = 8 << 10;  // of a row of x that is read in place
constexpr size_t kAlignment = 64;

// A problem, and what several choices ask of it.
struct Sizes {
  const CpuProblem& p;
  int64_t sum_bytes = size_of(sum_dtype(p.dtype));
  int64_t vector_bytes = p.kernel.lanes * sum_bytes;
  int64_t usual_group = kGroupBytes / sum_bytes;  // tokens
  int64_t x_bytes = p.inputs * size_of(p.dtype);  // of a token
  int64_t weights = p.weights();

  bool one_vector() const { return p.block * sum_bytes == vector_bytes; }
};

// Where a kernel packs x for its tiles of vectors, these read it in one stream, and an input that many outputs meet is
// worth the copy. Zen 3, 64 tokens, 256 bytes apart: 1024 x 1024, 50 %, b = 8, 16, 32 7, 5, 4 % faster; 25 % even (b =
// 8 from memory 7 % slower); 10 % 1 to 5 % slower; 4096 x 4096, b = 32, 10 % 8 % faster.
constexpr int64_t kSideBySideApart = 128, kSideBySideOutputs = 300;

// Rows of x at a large power of two apart fall into few sets of the cache, so they are packed. Up to 512 bytes apart
// they are as good as packed.
bool reads_features_in_place(const Sizes& s) {
  const CpuProblem& p = s.p;
  const int64_t apart = p.x_feature * s.sum_bytes;
  if (p.kernel.side_by_side && apart > kSideBySideApart && s.weights > kSideBySideOutputs * p.inputs) return false;
  return size_of(p.dtype) == s.sum_bytes && p.x_feature != 1 && (apart <= 512 || apart % 1024 != 0);
}

// Whether sums wait for those of the other blocks of their rows, where y is features-last: blocks of a line or less
// write each line in turns, and rows of y are often a power of two apart, so that none stays in L1. Zen 5, 1024 x 1024,
// 64 tokens, f32 b = 8, 10 %: 138 us to 96, b = 16 103 to 91, b = 32 93 to 86 (512 tokens: 1143, 891 and 766 to 799,
// 733 and 722), b = 64 83 to 89; bf16 b = 8 61 to 54, b = 32 43 to 45.
bool sums_wait(const CpuProblem& p) {
  const int64_t row = p.block * size_of(p.dtype);
  return row <= (size_of(p.dtype) == size_of(sum_dtype(p.dtype)) ? 128 : 32);
}

// Tokens that vectors along outputs do at a time. x of a group is to stay in L2 beside W. Zen 5, 512 tokens, width
// 1024, fprop 64 to 128 tokens: b = 32, 10 % 566 us to 525, 50 % 3046 to 2571; dgrad, 50 % 2654 to 2465.
int64_t group_along_outputs(int64_t token_bytes) {
  constexpr int64_t kBytes = 512 << 10;
  return token_bytes * kGroupAlongOutputs <= kBytes ? kGroupAlongOutputs : kGroupAlongOutputs / 2;
}

// Whether vectors run along outputs. In fprop W is copied for each group of tokens; to pack x and transpose y costs
// about as much for each element. Zen 5, 1024 x 1024, 64 tokens, 50 %: 322 us to 323 (b = 32), 320 to 327 (b = 64);
// 4096 x 4096, 10 % 1.10 ms to 1.18.
//
// Blocks of one vector have a load for each product, which costs Intel's CPUs nothing. Xeon (Emerald Rapids), N = 64, b
// = 16, in cache, dgrad at 2, 10, 50 % 45 us to 32, 121 to 91, 499 to 443, fprop at 10 % 119 to 99; N = 512, 10 % 989
// to 839, 965 to 844; Zen 5, whose loop had no constant addresses, 79 to 138.
bool runs_along_outputs(const Sizes& s, const Cpu& cpu) {
  constexpr int64_t kFewest = 16;  // tokens
  const CpuProblem& p = s.p;
  if (s.one_vector() && !cpu.intel) return false;
  if (p.kernel.along_outputs == 0 || p.block < p.kernel.along_outputs || p.n < kFewest || p.gated) return false;
  if (p.x_feature != 1 || p.y_feature != 1) return false;
  if (p.dtype == DType::bf16 && p.inputs % 2 != 0) return false;  // pairs
  // Rows of W are read as they are, pairs of them are copied either way. Rows of x of 16 KB are better packed: 4096 x
  // 4096, b = 32, 10 %, 512 tokens 9.0 ms to 10.7, 50 %, 32 tokens 3.33 to 3.55. Not on Intel's CPUs, where x, its
  // panels, sums that wait and y, 4 MB for 64 tokens, leave 2 MB of L2: Xeon, N = 64 1.68 ms to 1.42, 512 13.8 to 12.1.
  const bool large_rows = cpu.intel && s.vector_bytes == 64 && p.dtype == DType::f32;
  if (p.by_in) return large_rows || s.x_bytes <= kMostRowBytes;
  const int64_t copied = s.weights * ceil_div(p.n, group_along_outputs(s.x_bytes));
  return 2 * copied <= 5 * p.n * (p.inputs + p.outputs);
}

// Whether they read a copy of x. Rows of x are often 4 KB apart, so that a block of all tokens lies in few sets of 32
// KB of L1; a copy has to be used by some outputs. Zen 3, 1024 x 1024, b = 16, 64 tokens at 5, 10, 25 %: even, 7 and 5
// % faster; b = 32 and 64 even, with 512 tokens at 25 % 6 and 3 % faster; b = 32, 2 % 17 to 20 % slower.
// AVX-512: always with blocks of one vector, for addresses that are constants, and in dgrad for large rows: those of 16
// KB, 512 tokens 13.3 ms to 12.6 on the Xeon; b = 32 at 1024 features 79 us to 91.
bool packs_tokens(const Sizes& s) {
  const CpuProblem& p = s.p;
  if (s.vector_bytes == 64) {
    const bool large_rows = p.by_in && s.x_bytes > kMostRowBytes;
    return p.dtype == DType::f32 && (s.one_vector() || large_rows);
  }
  constexpr int64_t kFewestOutputs = 64, kFewTokensOfLarge = 64;
  return s.weights > kFewestOutputs * p.inputs && (p.block < 32 || p.n > kFewTokensOfLarge);
}

// One token is left to vectors along features even where a kernel sums by tiles. AMX: 4 tokens, b = 32, 10 % 24 us, as
// a tile of 16 8 us.
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

// Of blocks of 8, dgrad asks for the next one just before it is used: what came 16 KB before has left L1 again. Zen 5,
// 10 %: 5 % faster. Xeon (Emerald Rapids): features-first 10, 50 % 99 us to 86, 515 to 459 without, features-last 122
// to 110, from memory 4 to 8 %.
bool asks_again(const CpuProblem& p, ProductForm form, const Cpu& cpu) {
  const bool copied = p.dtype != DType::f32 || p.gated;  // W, with its scale
  return form == ProductForm::tokens_as_vectors && p.by_in && p.block == 8 && !copied && !cpu.intel;
}

// One token: the hardware follows W of large blocks. Xeon (Emerald Rapids), 1024 x 1024, 10 %, not asked for: fprop b =
// 16, 32, 64 9.5 us to 6.4, 7.8 to 5.5, 7.8 to 5.3, dgrad b = 32 5.4 to 4.6 in cache; from memory 27 to 35, 29 to 30,
// 29 to 30, 28 to 28: blocks of 16 are not worth it.
bool leaves_large_unasked(const Sizes& s, ProductForm form, const Cpu& cpu) {
  return form == ProductForm::few_tokens && s.p.n == 1 && s.p.block >= 32 && cpu.intel && s.vector_bytes == 64;
}

// dgrad by AMX copies a chunk of W once for a group. Xeon with AMX, bf16, 512 tokens, fprop and dgrad, of 64 and 128
// tokens: 4096 x 4096, b = 32, 10 % 3.09 ms and 3.97 to 2.62 and 2.90; 1024 x 1024, b = 64, 50 % 588 us and 822 to 512
// and 656, 10 % 216 and 243 to 197 and 216; b = 32, 50 % 743 to 682, but 10 %, three blocks a row, 217 and 232 to 236
// and 279. 256 tokens are no better.
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

// How many tokens a thread does by itself at a time; 0: threads share the pieces of a group. Those that do read x that
// others packed and write lines of y that others wrote in the call before, all of it through the last-level cache. Zen
// 5, 2 threads, 1024 x 1024, 10 %, from memory: 64 tokens, b = 8 74 us to 67, b = 32 69 to 55; 512 tokens, b = 8 519 to
// 486, b = 32 433 to 424. Half a group is a loss where x is read in place: hot 40 us to 48.
int64_t group_of_thread(const Sizes& s, const CpuPlan& plan, int64_t usual, int64_t tokens) {
  constexpr int64_t kInOneCache = 1 << 20;  // weights that every thread may as well read
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

// Tokens for whose sums there is room, in rounds like those of packed x.
int64_t staged_tokens(const Sizes& s) {
  const int64_t token_bytes = round_up(s.p.outputs, kStagedOutputs) * s.sum_bytes;
  return std::max(s.usual_group, round_tokens(s.p.n, token_bytes, s.usual_group));
}

size_t panel_bytes(const Sizes& s, int64_t tokens) {
  return static_cast<size_t>(tokens * round_up(s.p.inputs, s.p.block) * s.sum_bytes);
}

// Sets how many bytes its parts of a workspace have.
void measure(const Sizes& s, CpuPlan& plan) {
  const bool some = plan.packed || plan.form == ProductForm::tokens_as_vectors;  // else nothing is packed
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
  // One thread packs each group where the last one was, in its cache: 512 tokens 2 to 4 % faster on Zen 5.
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
