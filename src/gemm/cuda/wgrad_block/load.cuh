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

struct CopyArgs : Common {
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
  __device__ RingLoader(const RingArgs<Terms>& g, const Place<S>& place, int boxes, cuda::Ring<kStages>& ring,
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
  cuda::Ring<kStages>& ring_;
  uint32_t data_;
  StepPlace<S::kTokens> at_;
  int left_;
  cuda::RingPlace stage_;
};

// Fills one stage after the other by `cp.async`, 16 bytes a thread. All threads call `next`, which begins a stage, or
// nothing behind the last one, and commits it. Copies begin sooner than by TMA, whose maps have to be fetched.
template <class S>
class CopyLoader {
 public:
  __device__ CopyLoader(const CopyArgs& g, const Place<S>& place, uint32_t data)
      : data_(data),
        left_(static_cast<int>(g.x.n) - row()),
        dy_(first_of(g.dy, place.row[0])),
        x_(first_of(g.x, place.column[0])),
        dy_pass_(g.dy.token_stride * kRows * 2),
        x_pass_(g.x.token_stride * kRows * 2),
        dy_width_(width_of(g.dy, place.row[0])),
        x_width_(width_of(g.x, place.column[0])) {}

  __device__ void next() {
    if (left_ + row() > 0) {
      const uint32_t to =
          data_ + static_cast<uint32_t>(stage_ * S::kBoxes * S::kBox + row() * 128 + (chunk() ^ row() % 8) * 16);
      if (dy_width_ == S::block && x_width_ == S::block) load(to);
      else load_edge(to);
    }
    ptx::cp_async_commit();
    dy_ += dy_pass_ * kPasses, x_ += x_pass_ * kPasses, left_ -= S::kTokens;
    if (++stage_ == kStages) stage_ = 0;
  }

 private:
  static constexpr int kChunks = 8, kRows = S::kThreads / kChunks;  // of 16 bytes in a row; rows that a pass loads
  static constexpr int kPasses = S::kTokens / kRows;

  __device__ static int chunk() { return static_cast<int>(threadIdx.x) % kChunks; }
  __device__ static int row() { return static_cast<int>(threadIdx.x) / kChunks; }
  __device__ static const char* first_of(const Activations& a, int block) {
    return static_cast<const char*>(a.data) + 2 * (row() * a.token_stride + int64_t{block} * S::block + chunk() * 8);
  }
  // Features of a block that are in the matrix.
  __device__ static int width_of(const Activations& a, int block) {
    return static_cast<int>(min(a.features - int64_t{block} * S::block, int64_t{S::block}));
  }

  __device__ void load(uint32_t to) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool there = pass * kRows < left_;
#pragma unroll
      for (int h = 0; h < S::kHalves; ++h) {
        const uint32_t at = to + static_cast<uint32_t>(h * S::kBox + pass * kRows * 128);
        ptx::cp_async_16_or_zeros(at, dy_ + pass * dy_pass_ + h * 128, there);
        ptx::cp_async_16_or_zeros(at + S::kHalves * S::kBox, x_ + pass * x_pass_ + h * 128, there);
      }
    }
  }

  // Of a block at the edge of the matrix: few thread blocks, so the code is short.
  __device__ void load_edge(uint32_t to) const {
    const auto copy = [&](const char* from, int width, int box, int pass) {
      const int left = width - box % S::kHalves * S::kWidth - chunk() * 8;  // features
      const int bytes = pass * kRows < left_ ? 2 * min(max(left, 0), 8) : 0;
      ptx::cp_async_16_at(to + static_cast<uint32_t>(box * S::kBox + pass * kRows * 128), from, bytes);
    };
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll 1
      for (int h = 0; h < S::kHalves; ++h) {
        copy(dy_ + pass * dy_pass_ + h * 128, dy_width_, h, pass);
        copy(x_ + pass * x_pass_ + h * 128, x_width_, S::kHalves + h, pass);
      }
    }
  }

  uint32_t data_;
  int left_;  // tokens from this thread's row of the stage on
  const char *dy_, *x_;
  int64_t dy_pass_, x_pass_;  // bytes from one pass to the next
  int dy_width_, x_width_;
  int stage_ = 0;
};

}  // namespace
}  // namespace blocksparse::gemm::wgrad_block
