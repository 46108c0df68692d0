#include "gemm/cpu/plan.h"

#include <algorithm>

#include "core/places.h"
#include "gemm/cpu/kernels.h"

namespace blocksparse::gemm {

namespace {

constexpr int64_t kMostLanes = 16;        // f32 in 64 bytes: tokens are padded to whole vectors of any instruction set
constexpr int64_t kRoundTokens = 1024;    // enough tasks for any number of threads
constexpr int64_t kRoundBytes = 8 << 20;  // of packed activations: they stay in the last-level cache
constexpr size_t kAlignment = 64;

// Tokens of a round: as many as fit into kRoundBytes, in whole groups, but no more than there are.
int64_t round_tokens(int64_t n, int64_t bytes_per_token, int64_t group) {
  const int64_t fitting = kRoundBytes / std::max<int64_t>(1, bytes_per_token) / group * group;
  return std::min(round_up(n, kMostLanes), std::clamp(fitting, group, kRoundTokens));
}

// Where a kernel packs x for its tiles of vectors, these read it in one stream, and an input that many outputs meet is
// worth the copy. Zen 3, 64 tokens, 256 bytes apart: 1024 x 1024, 50 %, b = 8, 16, 32 7, 5, 4 % faster; 25 % even (b =
// 8 from memory 7 % slower); 10 % 1 to 5 % slower; 4096 x 4096, b = 32, 10 % 8 % faster.
constexpr int64_t kSideBySideApart = 128, kSideBySideOutputs = 300;

// Rows of x at a large power of two apart fall into few sets of the cache, so they are packed. Up to 512 bytes apart
// they are as good as packed.
bool reads_in_place(const Problem& p, int64_t sum_bytes) {
  const int64_t apart = p.x_feature_stride * sum_bytes;
  if (p.side_by_side && apart > kSideBySideApart && p.weights > kSideBySideOutputs * p.inputs) return false;
  return size_of(p.dtype) == sum_bytes && p.x_features_first && (apart <= 512 || apart % 1024 != 0);
}

constexpr int64_t kMostBytes = 8 << 10;  // of a row of x that is read in place

bool is_one_vector(const Product& p, int64_t vector_bytes) {
  return p.layout.block_size * size_of(sum_dtype(p.dtype)) == vector_bytes;
}

// Whether sums wait for those of the other blocks of their rows, where y is features-last: blocks of a line or less
// write each line in turns, and rows of y are often a power of two apart, so that none stays in L1. Zen 5, 1024 x 1024,
// 64 tokens, f32 b = 8, 10 %: 138 us to 96, b = 16 103 to 91, b = 32 93 to 86 (512 tokens: 1143, 891 and 766 to 799,
// 733 and 722), b = 64 83 to 89; bf16 b = 8 61 to 54, b = 32 43 to 45.
bool stages(const Problem& p) {
  const int64_t row = p.block * size_of(p.dtype);
  return row <= (size_of(p.dtype) == size_of(sum_dtype(p.dtype)) ? 128 : 32);
}

}  // namespace

// Threads that share pieces read x that others packed and write lines of y that others wrote in the call before, all of
// it through the last-level cache. Zen 5, 2 threads, 1024 x 1024, 10 %, from memory: 64 tokens, b = 8 74 us to 67, b =
// 32 69 to 55; 512 tokens, b = 8 519 to 486, b = 32 433 to 424. Half a group is a loss where x is read in place: hot 40
// us to 48.
int64_t group_of_thread(const Shares& s) {
  constexpr int64_t kInOneCache = 1 << 20;  // weights that every thread may as well read
  for (int64_t group = s.group; group >= s.smallest; group /= 2) {
    const int64_t groups = divide_up(s.tokens, group);
    if (group < s.group && s.weight_bytes > kInOneCache) break;
    if (groups % s.threads == 0 || groups >= 4 * s.threads) return group;
  }
  return 0;
}

ProductPlan plan_product(const Problem& p) {
  const int64_t sum_bytes = size_of(sum_dtype(p.dtype));
  ProductPlan plan;
  plan.group = 256 / sum_bytes;
  plan.few = p.n <= kUnpackedTokens && p.x_feature_stride == 1;
  plan.direct = reads_in_place(p, sum_bytes);
  plan.round = round_tokens(p.n, p.inputs * sum_bytes, plan.group);
  const int64_t features = round_up(p.inputs, p.block);
  plan.panel_bytes = static_cast<size_t>((plan.direct ? kMostLanes : plan.round) * features * sum_bytes);
  plan.partial_bytes = static_cast<size_t>(p.slots * plan.round * p.block * sum_bytes);
  if (stages(p)) {
    const int64_t token_bytes = round_up(p.outputs, kStagedOutputs) * sum_bytes;
    plan.staged_tokens = std::max(plan.group, round_tokens(p.n, token_bytes, plan.group));
    plan.staged_bytes = static_cast<size_t>(plan.staged_tokens * token_bytes);
  }
  return plan;
}

// In fprop W is copied for each group of tokens; to pack x and transpose y costs about as much for each element. Zen 5,
// 1024 x 1024, 64 tokens, 50 %: 322 us to 323 (b = 32), 320 to 327 (b = 64); 4096 x 4096, 10 % 1.10 ms to 1.18.
//
// Blocks of one vector have a load for each product, which costs Intel's CPUs nothing. Xeon (Emerald Rapids), N = 64, b
// = 16, in cache, dgrad at 2, 10, 50 % 45 us to 32, 121 to 91, 499 to 443, fprop at 10 % 119 to 99; N = 512, 10 % 989
// to 839, 965 to 844; Zen 5, whose loop had no constant addresses, 79 to 138.
bool runs_along_outputs(const Product& p, int32_t smallest, int64_t vector_bytes, const Cpu& cpu) {
  constexpr int64_t kFewest = 16;  // tokens
  const int64_t b = p.layout.block_size;
  if (is_one_vector(p, vector_bytes) && !cpu.intel) return false;
  if (smallest == 0 || b < smallest || p.x.n < kFewest || p.gates != nullptr) return false;
  if (p.x.feature_stride != 1 || p.y.feature_stride != 1) return false;
  if (p.dtype == DType::bf16 && p.x.features % 2 != 0) return false;  // pairs
  // Rows of W are read as they are, pairs of them are copied either way. Rows of x of 16 KB are better packed: 4096 x
  // 4096, b = 32, 10 %, 512 tokens 9.0 ms to 10.7, 50 %, 32 tokens 3.33 to 3.55. Not on Intel's CPUs, where x, its
  // panels, sums that wait and y, 4 MB for 64 tokens, leave 2 MB of L2: Xeon, N = 64 1.68 ms to 1.42, 512 13.8 to 12.1.
  const bool large_rows = cpu.intel && vector_bytes == 64 && p.dtype == DType::f32;
  if (p.by_in) return large_rows || p.x.features * size_of(p.dtype) <= kMostBytes;
  const int64_t group = group_along_outputs(p.x.features * size_of(p.dtype));
  const int64_t copied = p.layout.blocks * b * b * divide_up(p.x.n, group);
  return 2 * copied <= 5 * p.x.n * (p.x.features + p.y.features);
}

// What came 16 KB before has left L1 again. Zen 5, 10 %: 5 % faster. Xeon (Emerald Rapids): features-first 10, 50 % 99
// us to 86, 515 to 459 without, features-last 122 to 110, from memory 4 to 8 %.
bool asks_again(const Cpu& cpu) { return !cpu.intel; }

// Xeon (Emerald Rapids), 1024 x 1024, 10 %, not asked for: fprop b = 16, 32, 64 9.5 us to 6.4, 7.8 to 5.5, 7.8 to 5.3,
// dgrad b = 32 5.4 to 4.6 in cache; from memory 27 to 35, 29 to 30, 29 to 30, 28 to 28: blocks of 16 are not worth it.
bool leaves_large_unasked(int64_t vector_bytes, const Cpu& cpu) { return cpu.intel && vector_bytes == 64; }

// x of a group is to stay in L2 beside W. Zen 5, 512 tokens, width 1024, fprop 64 to 128 tokens: b = 32, 10 % 566 us to
// 525, 50 % 3046 to 2571; dgrad, 50 % 2654 to 2465.
int64_t group_along_outputs(int64_t token_bytes) {
  constexpr int64_t kBytes = 512 << 10;
  return token_bytes * kGroupAlongOutputs <= kBytes ? kGroupAlongOutputs : kGroupAlongOutputs / 2;
}

// Xeon with AMX, bf16, 512 tokens, fprop and dgrad, of 64 and 128 tokens: 4096 x 4096, b = 32, 10 % 3.09 ms and 3.97 to
// 2.62 and 2.90; 1024 x 1024, b = 64, 50 % 588 us and 822 to 512 and 656, 10 % 216 and 243 to 197 and 216; b = 32, 50 %
// 743 to 682, but 10 %, three blocks a row, 217 and 232 to 236 and 279. 256 tokens are no better.
int64_t group_of_tiles(const Product& p, int64_t round) {
  constexpr int64_t kLarge = 128, kUsual = 64, kLongList = 192;  // inputs that an output has
  const int64_t b = p.layout.block_size;
  const bool pays = b >= 64 || (b == 32 && p.layout.blocks * b * b >= kLongList * p.y.features);
  return round >= kLarge && pays ? kLarge : kUsual;
}

// Rows of x are often 4 KB apart, so that a block of all tokens lies in few sets of 32 KB of L1; a copy has to be used
// by some outputs. Zen 3, 1024 x 1024, b = 16, 64 tokens at 5, 10, 25 %: even, 7 and 5 % faster; b = 32 and 64 even,
// with 512 tokens at 25 % 6 and 3 % faster; b = 32, 2 % 17 to 20 % slower.
// AVX-512: always with blocks of one vector, for addresses that are constants, and in dgrad for large rows: those of 16
// KB, 512 tokens 13.3 ms to 12.6 on the Xeon; b = 32 at 1024 features 79 us to 91.
bool packs_tokens(const Product& p, int64_t vector_bytes) {
  if (vector_bytes == 64) {
    const bool large_rows = p.by_in && p.x.features * size_of(p.dtype) > kMostBytes;
    return p.dtype == DType::f32 && (is_one_vector(p, vector_bytes) || large_rows);
  }
  constexpr int64_t kFewestOutputs = 64, kFewTokensOfLarge = 64;
  const int64_t b = p.layout.block_size;
  return p.layout.blocks * b * b > kFewestOutputs * p.x.features && (b < 32 || p.x.n > kFewTokensOfLarge);
}

size_t ProductPlan::workspace_bytes() const { return panel_bytes + partial_bytes + staged_bytes + 3 * kAlignment; }

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
// 1.11x), at 10 % 0.72x. AVX-512 on Zen 5, at 10 %: b = 8 114 us to 98, 16 87 to 72, 32 81 to 71, 64 76 to 71; at 50 %
// even. More tokens are read in turns of 64, each added to dW: 512 tokens, b = 8, 16, 32 at 10 % from memory 1379 us to
// 815, 855 to 727, 790 to 602; b = 32 at 2 % 309 to 138; at 50 % even; 4096 x 4096, whose dW of 6.7 MB would come and
// go each time, at 10 % 11.4 ms to 14.9, at 2 % 4.2 to 3.2.
bool reads_tokens_in_place(const WeightGradient& g, int64_t vector_bytes) {
  const int64_t b = g.layout.block_size;
  if (g.pairs.size() != 1 || size_of(g.dtype) != size_of(sum_dtype(g.dtype))) return false;
  const GradTerm term = g.term(0);
  constexpr int64_t kMostBytes = 2 << 20;  // of dW
  if (term.x.n > kInPlaceTokens && (vector_bytes < 64 || g.layout.blocks * b * b * size_of(g.dtype) >= kMostBytes)) {
    return false;
  }
  if (term.x.feature_stride != 1 || term.dy.feature_stride != 1) return false;
  if (g.layout.in_features % b != 0 || g.layout.out_features % b != 0) return false;
  const int64_t panels = (g.layout.in_features + g.layout.out_features) / b;
  return vector_bytes >= 64 ? g.layout.blocks <= 8 * panels : 2 * g.layout.blocks <= panels;
}

// Rows of dy 4 KB apart lie in few sets of L1. Xeon (Emerald Rapids), N = 64, 10 %, b = 8, 16, 32, 64 128 us to 122, 97
// to 93, 94 to 88, 95 to 89; N = 512, b = 32 859 to 802. AMD's were not measured: Zen 5 waits less for L2.
bool copies_dy(int64_t vector_bytes, const Cpu& cpu) { return cpu.intel && vector_bytes == 64; }

// Zen 5, 1024 x 1024, 64 tokens, b = 32, with blocks of x that no block of W meets left out, in cache, at 2, 10, 50 %:
// 23 us to 14, 71 to 64, 317 to 297; b = 64, 2 %: 23 to 13; 512 tokens, b = 32, 10 % 611 to 490. Features-last dy that
// is read so, beside packed x: 65 to 72.
bool reads_dy_in_place(const WeightGradient& g) {
  if (g.pairs.size() != 1 || size_of(g.dtype) != size_of(sum_dtype(g.dtype))) return false;
  const Activations dy = g.term(0).dy;
  return dy.token_stride == 1 && dy.feature_stride != 1 && g.layout.out_features % g.layout.block_size == 0;
}

// With 32 KB of L1 and 512 KB of L2 a few tokens at a time are worth adding to dW each time, but for small blocks. Zen
// 3, 1024 x 1024, 512 tokens from memory: b = 32 at 2, 10, 50 % 497 us to 410, 1810 to 1510, 7860 to 6360, b = 64 at 10
// % 1820 to 1500; 4096 x 4096, b = 32, 10 % 24.9 ms to 22.0; b = 16 1550 to 1610, b = 8 1650 to 1800. Features-first, b
// = 32 1420 to 1470.
int64_t gradient_round(const WeightGradient& g, int64_t most, int64_t vector_bytes) {
  constexpr int64_t kTokens = 64;
  const bool wide = size_of(g.dw_dtype) == size_of(sum_dtype(g.dtype));
  if (vector_bytes != 32 || g.layout.block_size < 32 || !wide || g.pairs.empty()) return most;
  const GradTerm term = g.term(0);
  return term.x.feature_stride == 1 && term.dy.feature_stride == 1 ? std::min(most, kTokens) : most;
}

size_t GradientPlan::workspace_bytes() const { return panel_bytes + sums_bytes + 2 * kAlignment; }

}  // namespace blocksparse::gemm
