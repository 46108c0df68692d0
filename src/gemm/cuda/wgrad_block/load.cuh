// How x and dy come to the kernels of `wgrad_block`. A stage holds some tokens: dy of the block's outputs and x of its
// inputs, in boxes of [tokens, 64 features]. A token takes 128 bytes of a box, swizzled as wgmma reads them.
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
  int32_t blocks;
  const BlockRef* refs;   // of the rows of W
  const int32_t* out_of;  // the row of each block
  GradientTarget target;
  int64_t outputs, inputs;
};

// Terms: how many (x, dy) a launch may have. A single pair has a kernel of its own.
template <int Terms>
struct RingArgs : Common {
  CUtensorMap x[Terms], dy[Terms];
  TermSteps<Terms> steps;
  int32_t stages;
};

struct ShortArgs : Common {
  Activations x, dy;
};

// Blocks: how many blocks of dW a thread block makes. Two are made of b = 64 alone.
template <class T, int Block, int Tokens, int Blocks>
struct Shape {
  using Element = T;
  static constexpr int block = Block;
  static constexpr int kBlocks = Blocks;
  static constexpr int kTokens = Tokens;      // of a stage
  static constexpr int kHalves = Block / 64;  // boxes of a row of W, and of a column
  static constexpr int kWidth = 64;           // features of a box
  static constexpr int kBox = kTokens * kWidth * 2;
  static constexpr int kBoxes = 2 * kHalves * kBlocks;  // of a stage, at most
  static constexpr int kProducts = kHalves * kBlocks;   // of 64 outputs each
  static constexpr int kThreads = 128;                  // one warpgroup, which loads, multiplies and stores
  static constexpr int kResident = Block == 64 ? 8 / Blocks : 2;
};

// ---- Device ---------------------------------------------------------------------------------------------------------

// The blocks of dW that a thread block makes. They are neighbours in the layout's list.
template <class S>
struct Place {
  int first, count;
  int row[S::kBlocks], column[S::kBlocks];

  __device__ explicit Place(const Common& g) {
    first = static_cast<int>(blockIdx.x) * S::kBlocks;
    count = min(S::kBlocks, g.blocks - first);
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
      const int at = min(first + i, g.blocks - 1);
      row[i] = g.out_of[at], column[i] = g.refs[at].from;
    }
  }
  // Whether two blocks read one dy.
  __device__ bool shares_dy() const {
    return S::kBlocks == 2 && __shfl_sync(~0u, static_cast<int>(row[0] == row[S::kBlocks - 1]), 0) != 0;
  }
};

// Fills one stage after the other by TMA: dy of the first block, x, then dy of the second block unless it is shared.
// One thread calls `next`.
template <class S, int Terms>
class RingLoader {
 public:
  __device__ RingLoader(const RingArgs<Terms>& g, const Place<S>& place, int boxes, cuda::Ring<kMostStages>& ring,
                        uint32_t data)
      : g_(g), place_(place), boxes_(boxes), ring_(ring), data_(data), at_(g.steps, 0), left_(g.steps.all()) {}

  __device__ void next() {
    if (left_ == 0) return;
    const uint32_t full = ring_.full(stage_);
    uint32_t to = stage_.in(data_, boxes_ * S::kBox);
    ring_.expect(stage_, static_cast<uint32_t>(boxes_ * S::kBox));
    const auto load = [&](const CUtensorMap* maps, int feature) {
      ptx::load_box(to, maps + at_.term, full, feature, at_.token);
      to += S::kBox;
    };
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h) load(g_.dy, place_.row[0] * S::block + h * S::kWidth);
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < S::kHalves; ++h) load(g_.x, place_.column[b] * S::block + h * S::kWidth);
    }
    if (S::kBlocks == 2 && boxes_ == S::kBoxes) load(g_.dy, place_.row[S::kBlocks - 1] * S::block);
    stage_.advance(g_.stages);
    at_.advance(g_.steps);
    --left_;
  }

 private:
  const RingArgs<Terms>& g_;
  const Place<S>& place_;
  int boxes_;  // of a stage
  cuda::Ring<kMostStages>& ring_;
  uint32_t data_;
  StepPlace<S::kTokens> at_;
  int left_;
  cuda::RingPlace stage_;
};

// Loads every token at once, 16 bytes a thread. `cp.async` begins sooner than TMA, which has to fetch its maps: 64
// tokens, 4096 x 4096, b = 64, 10 % take 3.6 us instead of 3.8 (H100, 2026-11-26).
template <class S>
__device__ inline void load_all(const ShortArgs& g, const Place<S>& place, uint32_t data, int steps) {
  constexpr int kChunks = 8, kRows = S::kThreads / kChunks;  // of 16 bytes in a box's row; rows at a time
  const int thread = static_cast<int>(threadIdx.x), chunk = thread % kChunks, first = thread / kChunks;
  const auto load = [&](const Activations& a, int feature, int box) {
    feature += chunk * 8;
    const int width = static_cast<int>(min(max(a.features - feature, int64_t{0}), int64_t{8})) * 2;
    const auto* base = static_cast<const typename S::Element*>(a.data);
    uint32_t to = data + static_cast<uint32_t>(box * S::kBox + first * 128 + (chunk ^ first % 8) * 16);
    int token = first;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, to += (S::kBoxes - 1) * S::kBox) {
#pragma unroll
      for (int row = 0; row < S::kTokens; row += kRows, token += kRows, to += kRows * 128) {
        const bool there = token < a.n && width > 0;
        ptx::cp_async_16_at(to, there ? base + token * a.token_stride + feature : base, there ? width : 0);
      }
    }
  };
#pragma unroll 1
  for (int h = 0; h < S::kHalves; ++h) {
    load(g.dy, place.row[0] * S::block + h * S::kWidth, h);
    load(g.x, place.column[0] * S::block + h * S::kWidth, S::kHalves + h);
  }
  ptx::cp_async_commit();
}

}  // namespace
}  // namespace blocksparse::gemm::wgrad_block
