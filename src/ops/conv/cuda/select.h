// Which CUDA kernel does a convolution, and what it needs of workspace. Pure functions of sizes and card.
#pragma once

#include <string_view>

#include "cuda/card.h"
#include "gemm/cuda/families.h"
#include "ops/conv/conv.h"

namespace blocksparse::conv {

enum class CudaWay : int32_t {
  generic = 0,    // any card, any problem
  gather = 1,     // 16 bits, channels-last: the engine's families `wgmma` and `wgrad_wgmma` on gathered x
  pointwise = 2,  // one tap in place: pixels are tokens, and the engine does it as any product
  halo = 3,       // as `gather`, steps of one pixel: x is in shared memory once for all taps
};

std::string_view name_of(CudaWay way);

// Whether `gather` and `halo` run on a card: they need copies of boxes of images by hardware.
bool copies_boxes(const cuda::Card& card);

// The problem that the engine's kernel sees: a column of W is a block of channels at one tap.
gemm::CudaProblem gathered_problem(const Product& p);
gemm::CudaProblem gathered_problem(const WeightGradient& g);
int64_t inputs_of_tap(int64_t channels, int32_t block);  // filled up to whole chunks

// An order of channels is left to `generic`, or the way does it on a copy: see order/plan.h.
bool cuda_supports(CudaWay way, const Product& p, const cuda::Card& card);
bool cuda_supports(CudaWay way, const WeightGradient& g, const cuda::Card& card);
CudaWay choose_cuda_way(const Product& p, const cuda::Card& card);
CudaWay choose_cuda_way(const WeightGradient& g, const cuda::Card& card);

// Whether some card has another way than `generic` for what has no order.
bool has_fast_way(const Product& p);
bool has_fast_way(const WeightGradient& g);

// The layout's list with its taps, and a gate for each: in front of what the kernel itself needs.
struct TapPlaces {
  int64_t starts, refs, gates, end;
};
TapPlaces tap_places(int64_t rows, int64_t blocks, int64_t taps);

// As an ordinary product, or pair of activations, of one tap in place.
gemm::Product as_product(const Product& p);
gemm::Activations as_tokens(const Images& a);

// The generic kernel's wgrad: slices of the pixels whose sums are added afterwards, so that there are thread blocks
// enough. 16 blocks of 32 at 9 taps, f32, 64 images of 28 x 28: 72 thread blocks without, 10.1 ms (H200, 2026-11-22).
inline constexpr int32_t kGenericRows = 64;  // of a tile, channels
int32_t generic_slices(const WeightGradient& g);
int64_t generic_workspace(const WeightGradient& g);

// No way but `pointwise` takes as much.
inline constexpr int64_t kMostConvWorkspace = int64_t{64} << 20;

// Enough for any way that there is without a card's being known.
size_t cuda_workspace_bytes(const Product& p);
size_t cuda_workspace_bytes(const WeightGradient& g);

}  // namespace blocksparse::conv
