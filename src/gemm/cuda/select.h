// Which CUDA kernel does a call. Pure functions of sizes and card, so they are tested for cards that are not here, and
// in builds without CUDA.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "cuda/card.h"
#include "gemm/product.h"

namespace blocksparse::gemm {

// From plain to fast; a larger value is preferred.
enum class CudaKernel : int32_t {
  generic = 0,
  few = 1,
  many = 2,
  regions = 3,
  tiled = 4,
  rows = 5,
  sweep = 6,
  resident = 7
};
inline constexpr std::array kAllCudaKernels = {CudaKernel::generic, CudaKernel::few,     CudaKernel::many,
                                               CudaKernel::regions, CudaKernel::tiled,   CudaKernel::rows,
                                               CudaKernel::sweep,   CudaKernel::resident};
std::string_view name_of(CudaKernel kernel);
std::optional<CudaKernel> parse_cuda_kernel(std::string_view name);

// What the choice looks at: what is known on the host, so nothing that the tables say.
struct CudaProblem {
  Pass pass = Pass::fprop;
  DType dtype = DType::f32;
  int32_t block = 32;
  int64_t n = 0;        // wgrad: of all pairs
  int64_t inputs = 0;   // features that the pass reads; wgrad: in_features
  int64_t outputs = 0;  // features that it makes; wgrad: out_features
  int64_t blocks = 0;
  bool by_in = false;     // W is read transposed
  int64_t slots = 0;      // slices of split rows, at most
  bool w_aligned = true;  // W begins at a multiple of 16 bytes (wgrad: dW at one of two elements)
  bool x_in_rows = true;  // x (wgrad: all of them, and dy) has rows at multiples of 16 bytes, one behind the other
  bool x_first = false;   // rows are features (wgrad: of x and dy alike), else tokens
  bool gated = false;     // wgrad: the gates' gradient is wanted
  // wgrad: rows of W may be far longer than others, for some are cut. So say tables that were made on a card, always,
  // and those of layouts of some 30 rows, which are cut if they are but a little longer than the mean.
  bool uneven = false;
  int64_t pairs = 1;     // wgrad
  bool tf32 = false;     // f32: operands may be rounded to tf32
  bool may_fill = true;  // the kernel `many` may copy W as if it were dense

  int64_t input_blocks() const { return (inputs + block - 1) / block; }
  int64_t output_blocks() const { return (outputs + block - 1) / block; }
};

// fprop is that with dgrad's sizes exchanged; `n` tokens (wgrad: in all).
CudaProblem cuda_problem(Pass pass, const LayoutView& layout, DType dtype, int64_t n);

inline bool in_tf32(DType dtype, Math math) { return dtype == DType::f32 && math == Math::tf32; }

// The problem of a call; of all pairs together.
CudaProblem problem_of(const Product& p, Math math);
CudaProblem problem_of(const WeightGradient& g, Math math);

// Whether a card has what the kernel needs at all: registers, shared memory, instructions.
bool cuda_runs(CudaKernel kernel, const cuda::Card& card);
bool cuda_supports(CudaKernel kernel, const CudaProblem& p, const cuda::Card& card);
CudaKernel choose_cuda_kernel(const CudaProblem& p, const cuda::Card& card);

// Enough for the kernels that may be chosen for so many tokens, and for less where no row is cut (wgrad: always); for
// all of them, one of which may be forced.
size_t cuda_workspace_bytes(const CudaProblem& p);
size_t most_cuda_workspace_bytes(const CudaProblem& p);

// Whether the generic kernel lets thread blocks share a long row, whose sums then meet in the workspace.
bool generic_splits(const CudaProblem& p);

// How the kernel for few tokens is used.
inline constexpr int64_t kFewTokens = 64;  // of a slice
inline constexpr int64_t kMostFewTokens = 8 * kFewTokens;

// Of a launch: exact f32 takes no more, the others in rounds of so many.
int64_t few_round(const CudaProblem& p);

struct FewPlan {
  int32_t tokens = 0;  // of a slice: n rounded up to what there are kernels for
  int32_t slices = 1;
  int32_t warps = 0;  // of a thread block
  bool pack = false;  // x is copied even where it could be read in place
};
FewPlan plan_few(const CudaProblem& p, bool gated, const cuda::Card& card);

struct FewWorkspace {
  int64_t partial_bytes = 0, packed_bytes = 0;  // in this order
};
FewWorkspace few_workspace(const CudaProblem& p);

// Whether no row has more slices than a cluster has thread blocks: then the kernel `rows` has them do one each.
bool slices_fit_clusters(const CudaProblem& p);

// Whether the kernel `rows` walks the rows r, r + rows / 4, ... together: those of four gates, say.
bool rows_in_fours(const CudaProblem& p);

// Its gradient takes more: dW is what counts until the tokens do, which it copies.
constexpr int64_t most_few_gradient_tokens(const CudaProblem& p) {
  if (p.dtype == DType::f32) return p.block == 8 ? 1024 : 256;
  return p.block >= 64 ? 1024 : 2048;
}

struct FewGradientPlan {
  int32_t unit = 0;  // edge of what a warp computes at once
  int64_t units = 0, input_units = 0, output_units = 0;
  int64_t packed_bytes = 0;  // of x and dy; behind them lie the parts of the gates' gradients
  int64_t workspace_bytes = 0;
};
FewGradientPlan plan_few_gradient(const CudaProblem& p);

// Warps that share a tile of blocks, for tokens in `chunks` of 32.
int32_t few_gradient_split(int64_t tiles, int64_t chunks, const cuda::Card& card);

// Whether it is faster than those of `many` and `regions`.
bool few_gradient_pays(const CudaProblem& p, const cuda::Card& card);

// The (x, dy) that one launch of wgrad sums; the terms beyond the first 64 lie in the workspace.
inline constexpr int64_t kTermsByValue = 64;
inline constexpr int64_t kMostTerms = 4096;
inline constexpr int64_t kTermBytes = 48;

// How many of p.pairs, of p.n tokens together, a launch is best given. dW is rounded between launches unless it is f32.
int64_t pairs_at_once(const CudaProblem& p, DType dw_dtype, const cuda::Card& card);

}  // namespace blocksparse::gemm
