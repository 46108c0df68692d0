#include "gemm/cuda/select.h"

#include <algorithm>
#include <limits>

#include "core/index.h"
#include "core/places.h"
#include "gemm/cuda/wgmma/plan.h"
#include "gemm/cuda/wgrad_in_registers/plan.h"
#include "gemm/cuda/w_in_smem/plan.h"
#include "gemm/cuda/stream_x/plan.h"
#include "gemm/cuda/tiled_f32/plan.h"

namespace blocksparse::gemm {

std::string_view name_of(CudaKernel kernel) {
  switch (kernel) {
    case CudaKernel::generic: return "generic";
    case CudaKernel::few: return "few";
    case CudaKernel::regions: return "regions";
    case CudaKernel::many: return "many";
    case CudaKernel::tiled: return "tiled";
    case CudaKernel::rows: return "rows";
    case CudaKernel::sweep: return "sweep";
    case CudaKernel::resident: return "resident";
  }
  return "unknown";
}

std::optional<CudaKernel> parse_cuda_kernel(std::string_view name) {
  for (CudaKernel kernel : kAllCudaKernels) {
    if (name == name_of(kernel)) return kernel;
  }
  return std::nullopt;
}

bool slices_fit_clusters(const CudaProblem& p) {
  return most_slices(p.output_blocks(), p.input_blocks(), p.blocks) <= kFewSlices;
}

bool rows_in_fours(const CudaProblem& p) { return !p.by_in && p.outputs == 4 * p.inputs && p.inputs % p.block == 0; }

// 2^23 elements of x, should they have to be copied: of few features a launch of 512 tokens would not fill a card.
int64_t few_round(const CudaProblem& p) {
  if (p.dtype == DType::f32 && !p.tf32) return kFewTokens;
  if (p.slots > 0) return kMostFewTokens;  // the sums of slices are f32
  constexpr int64_t kElements = 1 << 23, kMost = 1 << 14;
  const int64_t slices = kElements / std::max<int64_t>(1, p.inputs) / kFewTokens;
  return std::clamp(slices * kFewTokens, kMostFewTokens, kMost);
}

namespace {

// Any activations: what lies otherwise than the kernel reads it is packed. Its offsets, of x in a round and of W, count
// 16 and 64 bytes in 32 bits; y has 64 bits, but a round of it no more thread blocks than a grid has.
bool few_supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 36;
  if (p.pass == Pass::wgrad) {
    return (size_of(p.dtype) == 2 || p.tf32) && p.n >= 1 && p.n <= most_few_gradient_tokens(p) &&
           p.blocks * p.block * p.block < kMost / 4 && std::max(p.inputs, p.outputs) < kMost / 64;
  }
  const int64_t round = few_round(p);
  const bool in_rounds = p.tf32 || size_of(p.dtype) == 2;
  return p.dtype != DType::f64 && p.n >= 1 && (in_rounds || p.n <= round) && p.w_aligned &&
         p.blocks * p.block * p.block < kMost && p.inputs * round < kMost / 2 && p.outputs * kMostFewTokens < kMost / 2;
}

// us of tf32, `few` (tiled), H200, 2026-11-22. 4096 x 4096, fprop: b = 32, .25, n = 128, 256, 512 19 (115), 32 (115),
// 63 (115); b = 8, .1, n = 128, 512 15 (218), 62 (207); b = 128, .25, n = 512 59 (96). 12288 x 12288, density .1,
// wgrad: b = 32, n = 32, 64, 128, 512 24 (52), 38 (60), 60 (77), 201 (182); b = 8, n = 32, 512 50 (114), 561 (794).
bool few_pays_in_tf32(const CudaProblem& p) {
  if (!p.tf32 || !few_supports(p)) return false;
  return p.pass == Pass::wgrad || p.block <= 16 || p.n <= kMostFewTokens;
}

// The last block of inputs is whole: boxes fill x up with zeros, but W may hold anything there.
bool rows_support(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 31;
  return p.pass != Pass::wgrad && size_of(p.dtype) == 2 && p.block == 32 && p.n >= 1 && p.inputs >= 1 &&
         p.inputs % p.block == 0 && p.x_in_rows && !p.x_first && p.w_aligned && !p.gated &&
         p.blocks * p.block < kMost && p.outputs < kMost && p.n <= kMostFewTokens;
}

// us, bf16, b = 32, H200, 2026-11-22, few (rows), of 65, 128, 256 and 512 tokens
//   4096, 10 %      7.2 (8.0), 7.7 (8.0), 12.6 (11.0), 19.4 (14.9)
//   5600, 4 %       6.5 (7.2), 6.9 (6.8), 11.1 (8.6), 20.4 (12.2)
//   the same, four rows together    19.6 (11.2), 21.1 (11.5), 39.6 (17.1), 74.9 (26.4)
//   8192, 2 %       8.6 (7.2), 9.6 (6.6), 14.6 (8.9), 27.1 (12.6)
//   8192, 10 %      16.6 (22.1), 18.4 (19.2), 28.3 (26.8), 54.6 (45.1)
//   8192, 50 %      60 (101), 62 (82), 96 (131), 186 (215): `few` packs x there
//   18432, 2.95 %   22.4 (21.5), 24.3 (20.1), 45.9 (35.5), 90.7 (63.8)
//   ba(384,8)       128, 256 and 512 tokens: 22.1 (18.5), 40.0 (30.4), 71.0 (66.1): clusters share rows that are cut
// Four rows together are walked whole, the longest by one thread block: it is no longer than there are blocks of
// inputs.
bool rows_pay(const CudaProblem& p) {
  constexpr int64_t kMostOfHub = 256;
  if (p.n <= kFewTokens) return false;
  if (p.slots > 0 && !(rows_in_fours(p) ? p.input_blocks() <= kMostOfHub : slices_fit_clusters(p))) return false;
  const double grid = static_cast<double>(p.output_blocks()) * static_cast<double>(p.input_blocks());
  const double most = p.n > 128 || rows_in_fours(p) ? 0.15 : 0.05;
  return static_cast<double>(p.blocks) < most * grid;
}

}  // namespace

bool cuda_runs(CudaKernel kernel, const cuda::Card& card) {
  const bool hopper = kernel == CudaKernel::many || kernel == CudaKernel::rows || kernel == CudaKernel::sweep ||
                      kernel == CudaKernel::resident;
  return card.arch >= cuda::kOldestArch && (!hopper || card.sm90a);
}

bool cuda_supports(CudaKernel kernel, const CudaProblem& p, const cuda::Card& card) {
  if (!cuda_runs(kernel, card)) return false;
  switch (kernel) {
    case CudaKernel::generic: return true;
    case CudaKernel::few: return few_supports(p);
    case CudaKernel::regions: return regions_support(p);
    case CudaKernel::many: return many_supports(p);
    case CudaKernel::tiled: return tiled_supports(p);
    case CudaKernel::rows: return rows_support(p);
    case CudaKernel::sweep: return sweep_supports(p);
    case CudaKernel::resident: return resident_supports(p);
  }
  return false;
}

namespace {

bool few_is_best_gradient(const CudaProblem& p, const cuda::Card& card) {
  return p.pass == Pass::wgrad && few_supports(p) && few_gradient_pays(p, card);
}

// Whether the kernel is faster than those of smaller values, for what it supports.
// few (generic), fprop, 4096 x 4096, 4096 tokens, bf16, us, H200, 2026-11-23: b = 8, .25 547 (2085); b = 32, .25, .1
// 243, 143 (425, 229); b = 64, .5 423 (531); b = 128, .25 251 (317). 256 x 256, 20000 tokens, b = 32 38 (43).
bool cuda_pays(CudaKernel kernel, const CudaProblem& p, const cuda::Card& card) {
  switch (kernel) {
    case CudaKernel::generic:
    case CudaKernel::few: return true;
    case CudaKernel::many: return many_pays(p) && !few_is_best_gradient(p, card);
    case CudaKernel::regions: return regions_pay(p, card) && !few_is_best_gradient(p, card);
    case CudaKernel::tiled: return tiled_pays(p, card) && !few_pays_in_tf32(p);
    case CudaKernel::rows: return rows_pay(p);
    case CudaKernel::sweep: return sweep_pays(p);
    case CudaKernel::resident: return resident_pays(p);
  }
  return false;
}

}  // namespace

CudaKernel choose_cuda_kernel(const CudaProblem& p, const cuda::Card& card) {
  for (auto kernel = kAllCudaKernels.rbegin(); kernel != kAllCudaKernels.rend(); ++kernel) {
    if (cuda_pays(*kernel, p, card) && cuda_supports(*kernel, p, card)) return *kernel;
  }
  return CudaKernel::generic;
}

// From 1024 tokens on there are 16 tiles of tokens to every row: enough work to hide a long one that starts first, and
// the workspace stays small.
bool generic_splits(const CudaProblem& p) { return p.slots > 0 && p.n < 1024; }

// Figures: H200, 12288 x 12288, bf16, cold, us, of densities .5, .1 and .02; 2026-11-21.
FewPlan plan_few(const CudaProblem& p, bool gated, const cuda::Card& card) {
  FewPlan plan;
  const bool f32 = p.dtype == DType::f32 && !p.tf32;
  // Kernels for 8, 32 and 64 tokens; b <= 16 has 16 in place of 8: n = 8, b = 8 takes 51.1, 15.4, 8.0 with either, for
  // mma has 16 rows. b = 32, n = 16 has none: 41.0, 11.4, 4.6 with 32 and 41.7, 11.6, 4.8 with one of its own. With
  // gates there is none below 32, which halves what there is to compile.
  const int32_t least = f32 ? 8 : gated ? 32 : p.block <= 16 ? 16 : 8;
  plan.tokens = p.n <= least ? least : p.n <= 32 ? 32 : kFewTokens;
  plan.slices = static_cast<int32_t>(divide_up(p.n, plan.tokens));
  // Two warps for b = 8, so that rows of few blocks keep them busy. Where all strips of 32 outputs are resident at
  // once, 8 instead of 4: 4096 x 4096, density .1, b = 32: 4.2 (5.0).
  const int64_t strips = (p.output_blocks() * std::max(1, p.block / 32) + p.slots) * plan.slices;
  // f32's rings of 8 warps take up to 148 KB of shared memory, of which 8.6, 8.9 and 12.0 have 99.
  const bool large = !f32 || card.arch == 80 || (card.arch >= 90 && card.arch < 120);
  plan.warps = p.block == 8 ? 2 : p.block >= 32 && strips <= card.multiprocessors && large ? 8 : 4;
  // Packed, 64 tokens of x are read in lines of 128 bytes: 50.6 (55.3) at .5, 29.4 (31.3) at .25, the same at .1, more
  // below; with 32 tokens never less.
  const double density =
      static_cast<double>(p.blocks) / static_cast<double>(std::max<int64_t>(1, p.output_blocks() * p.input_blocks()));
  plan.pack = !f32 && (p.block < 32 || (p.block == 32 && plan.tokens == 64 && density >= 0.15));
  return plan;
}

FewWorkspace few_workspace(const CudaProblem& p) {
  const int64_t tokens = p.n <= 32 ? 32 : round_up(p.n, kFewTokens);
  return {.partial_bytes = p.slots * p.n * p.block * 4,
          .packed_bytes = p.input_blocks() * p.block * tokens * size_of(p.dtype)};
}

FewGradientPlan plan_few_gradient(const CudaProblem& p) {
  FewGradientPlan plan;
  plan.unit = std::min(p.block, 32);
  const int64_t side = p.block / plan.unit;
  plan.units = p.blocks * side * side;
  plan.input_units = p.input_blocks() * side;
  plan.output_units = p.output_blocks() * side;
  // Pairs are packed 64 at a time, in whole chunks of 64 bytes a feature.
  const int64_t tokens = 64 / size_of(p.dtype);
  const int64_t chunks = divide_up(p.n, tokens) + (std::max<int64_t>(p.n, 1) - 1) / 64;
  plan.packed_bytes = (plan.input_units + plan.output_units) * chunks * plan.unit * 64;
  plan.workspace_bytes = plan.packed_bytes + plan.units * 4;
  return plan;
}

// us of 1024 tokens, 4096 x 4096, bf16, H200, 2026-11-22 and 24, of few, `regions` and `many`:
//
//   b = 8      of density .25 161, 87, 87; .10 82, 45, 84; .05 60, -, 57
//   b = 16     .25 94, 56, 81; .10 51, 32, 78
//   b = 32     .25 49, 48, 56; .10 28, 34, 33
//   b = 64     .25 53, -, 44; .10 31, -, 31
//   b = 128    .25 53, -, 27; .10 31, -, 28
//
// Of 512 tokens b = 64 takes 27 and 17 (`many` 36 and 27). `regions` takes about 25 at the least.
bool few_gradient_pays(const CudaProblem& p, const cuda::Card& card) {
  if (p.n < 1024) return true;
  if (p.block > 32 || p.n >= 2048) return false;
  const bool beside_regions = regions_support(p) && regions_pay(p, card);
  const double most = p.block == 8    ? (beside_regions ? 0.02 : 0.09)
                      : p.block == 16 ? (beside_regions ? 0.04 : 0.2)
                                      : (beside_regions ? 0.2 : 0.3);
  return static_cast<double>(p.blocks) < most * static_cast<double>(p.output_blocks() * p.input_blocks());
}

// us of 8 pairs of 2048 tokens, 4096 x 4096, bf16, dW f32, H200, 2026-11-23, one by one (in one launch): b = 128, .25
// 385 (191); b = 64, .1 283 (283); b = 32, .25, .1 759, 433 (589, 290); b = 16, .1 by `regions` 771 (735). Of 256
// tokens, generic (in one launch of `many`): b = 64, .1 68 (36); b = 32, .1 58 (49); b = 16, .1 104 (117). By `regions`
// as it is since (2026-11-24) b = 16, .25 and .1 take 784 and 427 one by one; b = 8 likewise (select_regions.cc).
int64_t pairs_at_once(const CudaProblem& p, DType dw_dtype, const cuda::Card& card) {
  if (size_of(p.dtype) != 2 || p.pairs < 2) return kMostTerms;
  constexpr int64_t kLong = 1024;
  CudaProblem one = p, some = p;
  one.n = p.n / p.pairs, one.pairs = 1;
  some.pairs = std::min<int64_t>(p.pairs, kMostManyTerms), some.n = one.n * some.pairs;
  const CudaKernel alone = choose_cuda_kernel(one, card);
  const bool in_parts = dw_dtype == DType::f32;
  const bool one_by_one = in_parts && one.n >= kLong && alone != CudaKernel::generic;
  if (one_by_one && alone == CudaKernel::regions && p.block <= 16) return 1;
  if (cuda_supports(CudaKernel::many, some, card) && one.n >= (p.block >= 32 ? 128 : kLong) &&
      (in_parts || p.pairs == some.pairs)) {
    return kMostManyTerms;
  }
  return one_by_one ? 1 : kMostTerms;
}

int32_t few_gradient_split(int64_t tiles, int64_t chunks, const cuda::Card& card) {
  const int64_t resident = int64_t{card.multiprocessors} * 12;
  return tiles >= resident || chunks < 2 ? 1 : 2 * tiles >= resident || chunks < 4 ? 2 : 4;
}

namespace {

size_t generic_workspace_bytes(const CudaProblem& p) {
  if (p.pass == Pass::wgrad) {
    return static_cast<size_t>(p.n > kTermsByValue ? std::min(p.n, kMostTerms) * kTermBytes : 0);
  }
  if (!generic_splits(p)) return 0;
  return static_cast<size_t>(p.slots * p.n * p.block * size_of(sum_dtype(p.dtype)));
}

// That of n tokens suffices for less, so also for this kernel with as many as it takes.
size_t few_workspace_bytes(CudaProblem p) {
  p.tf32 = p.dtype == DType::f32;
  p.n = std::min(p.n, p.pass == Pass::wgrad ? most_few_gradient_tokens(p) : few_round(p));
  if (!few_supports(p)) return 0;
  if (p.pass == Pass::wgrad) return static_cast<size_t>(plan_few_gradient(p).workspace_bytes);
  const FewWorkspace w = few_workspace(p);
  return static_cast<size_t>(w.partial_bytes + w.packed_bytes);
}

// Also for the last of several launches, which has fewer tokens.
size_t many_workspace_bytes(CudaProblem p) {
  p.n = std::min<int64_t>(p.n, std::numeric_limits<int32_t>::max());
  if (!many_supports(p)) return 0;
  const int64_t bytes =
      p.pass == Pass::wgrad ? gradient_places(p, gradient_form_of(p)).end : many_places(plan_many(p), p.block).end;
  return static_cast<size_t>(bytes);
}

size_t region_workspace_bytes(CudaProblem p) {
  p.n = std::min<int64_t>(p.n, std::numeric_limits<int32_t>::max());
  return regions_support(p) ? static_cast<size_t>(region_places(p).end) : 0;
}

size_t tiled_workspace(CudaProblem p) {
  p.n = std::min<int64_t>(p.n, kTiledTokens);
  return tiled_supports(p) ? static_cast<size_t>(tiled_workspace_bytes(p)) : 0;
}

}  // namespace

size_t cuda_workspace_bytes(const CudaProblem& p) {
  if (many_pays(p)) return most_cuda_workspace_bytes(p);  // nor do regions for less
  return std::max({generic_workspace_bytes(p), few_workspace_bytes(p), tiled_workspace(p)});
}

size_t most_cuda_workspace_bytes(const CudaProblem& p) {
  return std::max({generic_workspace_bytes(p), few_workspace_bytes(p), many_workspace_bytes(p),
                   region_workspace_bytes(p), tiled_workspace(p)});
}

}  // namespace blocksparse::gemm
