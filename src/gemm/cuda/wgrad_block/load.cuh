// How x and dy come to the kernels of `wgrad_block`: a stage holds, of some tokens, dy of the block's outputs and x of
// its inputs, in boxes of [tokens, 64 features], 128 bytes a token, swizzled as wgmma reads them.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ring.h"
#include "gemm/cuda/gradient_target.cuh"
#include "gemm/cuda/wgrad_block/plan.h"
#include "gemm/cuda/wgrad_wgmma/terms.cuh"

namespace blocksparse::gemm::wgrad_block {
namespace {

using ptx::shared_address;
using wgrad_wgmma::StepPlace;
using wgrad_wgmma::TermSteps;

// ---- Config ---------------------------------------------------------------------------------------------------------

// What both kernels are given.
struct Common {
  const BlockRef* refs;   // of the rows of W
  const int32_t* out_of;  // the row of each block
  GradientTarget target;
  int64_t outputs, inputs;
};

// Terms: the (x, dy) of a launch, at most; one alone has a kernel of its own.
template <int Terms>
struct RingArgs : Common {
  CUtensorMap x[Terms], dy[Terms];
  TermSteps<Terms> steps;
  int32_t stages;
};

struct ShortArgs : Common {
  Activations x, dy;
};

template <class T, int Block, int Tokens>
struct Shape {
  using Element = T;
  static constexpr int block = Block;
  static constexpr int kTokens = Tokens;      // of a stage
  static constexpr int kHalves = Block / 64;  // boxes of dy, and of x
  static constexpr int kWidth = 64;           // features of a box
  static constexpr int kBox = kTokens * kWidth * 2;
  static constexpr int kStageBytes = 2 * kHalves * kBox;
  static constexpr int kThreads = 128;  // one warpgroup, which loads, multiplies and stores
};

// ---- Device ---------------------------------------------------------------------------------------------------------

// A block of dW.
template <class S>
struct Place {
  int id, row, column;

  __device__ explicit Place(const Common& g)
      : id(static_cast<int>(blockIdx.x)), row(g.out_of[id]), column(g.refs[id].from) {}
  __device__ int output() const { return row * S::block; }
  __device__ int input() const { return column * S::block; }
};

// Boxes by TMA, one stage after the other. Everything is done by one thread.
template <class S, int Terms>
class RingLoader {
 public:
  __device__ RingLoader(const RingArgs<Terms>& g, const Place<S>& place, cuda::Ring<kMostStages>& ring, uint32_t data)
      : g_(g), place_(place), ring_(ring), data_(data), at_(g.steps, 0), left_(g.steps.all()) {}

  __device__ void next() {
    if (left_ == 0) return;
    const uint32_t full = ring_.full(stage_);
    uint32_t to = stage_.in(data_, S::kStageBytes);
    ring_.expect(stage_, S::kStageBytes);
#pragma unroll
    for (int i = 0; i < 2 * S::kHalves; ++i, to += S::kBox) {
      const bool of_dy = i < S::kHalves;
      const int feature = (of_dy ? place_.output() : place_.input()) + i % S::kHalves * S::kWidth;
      ptx::load_box(to, (of_dy ? g_.dy : g_.x) + at_.term, full, feature, at_.token);
    }
    stage_.advance(g_.stages);
    at_.advance(g_.steps);
    --left_;
  }

 private:
  const RingArgs<Terms>& g_;
  const Place<S>& place_;
  cuda::Ring<kMostStages>& ring_;
  uint32_t data_;
  StepPlace<S::kTokens> at_;
  int left_;
  cuda::RingPlace stage_;
};

// Every token at once, 16 bytes a thread: sooner there than boxes, which wait for their maps (64 tokens, 4096 x 4096,
// b = 64, 10 %: 3.6 us instead of 3.8; H100, 2026-11-26).
template <class S>
__device__ inline void load_all(const ShortArgs& g, const Place<S>& place, uint32_t data, int steps) {
  constexpr int kChunks = 8, kRows = S::kThreads / kChunks;  // of 16 bytes in a box's row; rows at a time
  const int thread = static_cast<int>(threadIdx.x), chunk = thread % kChunks, first = thread / kChunks;
  const auto load = [&](const Activations& a, int feature, uint32_t to) {
    const int width = static_cast<int>(min(max(a.features - feature, int64_t{0}), int64_t{8})) * 2;
    const auto* from = static_cast<const typename S::Element*>(a.data);
    for (int token = first; token < steps * S::kTokens; token += kRows) {
      const bool there = token < a.n && width > 0;
      const uint32_t row = to + static_cast<uint32_t>(token / S::kTokens * S::kStageBytes + token % S::kTokens * 128);
      ptx::cp_async_16_at(row + static_cast<uint32_t>((chunk ^ token % 8) * 16),
                          there ? from + token * a.token_stride + feature : from, there ? width : 0);
    }
  };
#pragma unroll
  for (int half = 0; half < S::kHalves; ++half) {
    const int feature = half * S::kWidth + chunk * 8;
    load(g.dy, place.output() + feature, data + static_cast<uint32_t>(half * S::kBox));
    load(g.x, place.input() + feature, data + static_cast<uint32_t>((S::kHalves + half) * S::kBox));
  }
  ptx::cp_async_commit();
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_block
