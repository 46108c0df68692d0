// Which CUDA way does a convolution, and how much workspace it needs. Pure functions of sizes and card.
#pragma once

#include <string_view>

#include "cuda/card.h"
#include "gemm/cuda/families.h"
#include "ops/conv/conv.h"

namespace blocksparse::conv {

enum class CudaWay : int32_t {
  generic = 0,     // any card, any problem
  gather = 1,      // 16 bits, channels-last: the engine's families `wgmma` and `wgrad_wgmma` gather x
  pointwise = 2,   // one tap in place: pixels are tokens of an ordinary product
  halo = 3,        // as `gather`, with steps of one pixel: x is in shared memory once for all taps
  halo_block = 4,  // wgrad as `halo`, a cluster of thread blocks for each block of W
};

std::string_view name_of(CudaWay way);

// Whether `gather`, `halo` and `halo_block` run on a card: its hardware must copy boxes of images.
bool copies_boxes(const cuda::Card& card);

// The problem that the engine's kernel sees. A column of W is a block of channels at one tap.
gemm::CudaProblem gathered_problem(const Product& p);
gemm::CudaProblem gathered_problem(const WeightGradient& g);
int64_t inputs_of_tap(int64_t channels, int32_t block);  // rounded up to whole chunks

// Whether a way does a problem. With an order of channels `generic` does it as it is, other ways on a copy: see
// order/plan.h.
bool cuda_supports(CudaWay way, const Product& p, const cuda::Card& card);
bool cuda_supports(CudaWay way, const WeightGradient& g, const cuda::Card& card);
CudaWay choose_cuda_way(const Product& p, const cuda::Card& card);
CudaWay choose_cuda_way(const WeightGradient& g, const cuda::Card& card);

// Whether a way other than `generic` does this on some card. The problem has no order of channels.
bool has_fast_way(const Product& p);
bool has_fast_way(const WeightGradient& g);

// The layout's list of blocks with their taps, and a gate for each. It lies in front of the kernel's own workspace.
struct TapPlaces {
  int64_t starts, refs, gates, end;
};
TapPlaces tap_places(int64_t rows, int64_t blocks, int64_t taps);

// A convolution of one tap in place as an ordinary product, and its images as tokens.
gemm::Product as_product(const Product& p);
gemm::Activations as_tokens(const Images& a);

// Slices of the pixels for wgrad by the generic kernel. Their sums are added afterwards. Without slices there may be
// too few thread blocks: 72 of them take 10.1 ms (16 blocks of 32 at 9 taps, f32, 64 images of 28 x 28, H200,
// 2026-11-22).
inline constexpr int32_t kGenericRows = 64;  // of a tile, channels
int32_t generic_slices(const WeightGradient& g);
int64_t generic_workspace(const WeightGradient& g);

// The bound on the workspace of every way but `pointwise`.
inline constexpr int64_t kMostConvWorkspace = int64_t{64} << 20;

// Enough for any way, because the card is not known yet.
size_t cuda_workspace_bytes(const Product& p);
size_t cuda_workspace_bytes(const WeightGradient& g);

}  // namespace blocksparse::conv
