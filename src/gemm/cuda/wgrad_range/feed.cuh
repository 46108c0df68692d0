// The feeding side of the kernel `wgrad_range`: which blocks of dW a thread block makes at a time, and the warps that
// fill a ring of stages for them.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ring.h"
#include "gemm/cuda/gradient_target.cuh"
#include "gemm/cuda/wgrad_range/plan.h"
#include "gemm/cuda/wgrad_wgmma/terms.cuh"

namespace blocksparse::gemm::wgrad_range {
namespace {

using ptx::shared_address;
using wgrad_wgmma::StepPlace;
using wgrad_wgmma::TermSteps;

// ---- Config ---------------------------------------------------------------------------------------------------------

template <int Terms>
struct Args {
  CUtensorMap x[Terms], dy[Terms];  // of each (x, dy) of a list
  TermSteps<Terms> steps;
  const BlockRef* refs;   // of the rows of W
  const int32_t* out_of;  // the row of each block
  GradientTarget target;
  int32_t blocks;
  int64_t outputs, inputs;
};

// Terms: the (x, dy) of a launch, at most; one alone has a kernel of its own.
template <class T, int Block, int Terms>
struct Kernel {
  using Element = T;
  using KernelArgs = Args<Terms>;
  static constexpr int block = Block;
  static constexpr int kBlocks = Block == 64 ? 4 : 1;  // of dW, of a job
  static constexpr int kRows = Block == 64 ? 2 : 1;    // that they may lie in
  static constexpr int kWidth = 64;                    // features of a box: of a row (b = 128: half of one), of a block
  static constexpr int kDyBoxes = 2, kXBoxes = Block == 64 ? kBlocks : 2;  // at most
  static constexpr int kTokens = 64;                                       // of a stage
  static constexpr int kBox = kTokens * kWidth * 2;
  static constexpr int kStageBytes = (kDyBoxes + kXBoxes) * kBox;
  static constexpr int kStages = 224 * 1024 / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  // One warp alone is late: b = 128, 25 %, 1024 tokens 27.2 us instead of 20.0 (H200, 2026-11-26).
  static constexpr int kFeeders = 2;
  static constexpr int kFeedRegisters = 40, kRegisters = 232;
  static constexpr int kThreads = 384;  // two warps of the third warpgroup have nothing to do
};

template <class K>
struct Shared {
  cuda::Ring<K::kStages> ring;
};

// ---- Device ---------------------------------------------------------------------------------------------------------

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % 32; }

// Neighbours of the list, in one or two rows of W.
struct Job {
  int first = 0, count = 0;
  int rows = 0, second = 0;  // second: the first block of the second row, if there are two; else count
};

// The jobs of this thread block, whose part of the list is as long as those of others. Every warp goes through them.
template <class K>
class Jobs {
 public:
  __device__ explicit Jobs(const typename K::KernelArgs& g)
      : g_(g), at_(bound(blockIdx.x)), end_(bound(blockIdx.x + 1)) {}

  __device__ bool more() const { return at_ < end_; }

  // All lanes. `row` and `column` are those of the block whose number is the lane's.
  __device__ Job next(int& row, int& column) {
    Job job;
    job.first = at_;
    const int left = end_ - at_;
    const int jobs = (left + K::kBlocks - 1) / K::kBlocks, wanted = (left + jobs - 1) / jobs;
    const int i = min(at_ + lane(), end_ - 1);
    row = g_.out_of[i], column = g_.refs[i].from;
    const int before = __shfl_up_sync(~0u, row, 1);
    const unsigned begins = __ballot_sync(~0u, lane() < wanted && (lane() == 0 || row != before));
    const int third = static_cast<int>(__fns(begins, 0, K::kRows + 1));  // -1: there is none
    job.count = third < 0 ? wanted : third;
    job.rows = min(__popc(begins), K::kRows);
    job.second = job.rows == 2 ? static_cast<int>(__fns(begins, 0, 2)) : job.count;
    at_ += job.count;
    return job;
  }
  __device__ Job next() {
    int row, column;
    return next(row, column);
  }

 private:
  __device__ int bound(unsigned block) const {
    return static_cast<int>(static_cast<uint64_t>(g_.blocks) * block / gridDim.x);
  }

  const typename K::KernelArgs& g_;
  int at_, end_;
};

// A warp that fills every so many stages of the ring: dy of the rows, then x of the blocks, one behind the other, a box
// each lane.
template <class K>
class Feeder {
 public:
  __device__ Feeder(const typename K::KernelArgs& g, Shared<K>& shared, uint32_t data, int feeder)
      : g_(g), jobs_(g), shared_(shared), data_(data), ahead_(feeder) {
    place_.stage = feeder;
  }

  __device__ void run() {
    const int steps = g_.steps.all();
    while (jobs_.more()) {
      const Box box = next_box();
      for (; ahead_ < steps; advance()) fill(box);
      ahead_ -= steps;
    }
  }

 private:
  // Of this lane, in each stage of a job; and how many there are.
  struct Box {
    const CUtensorMap* maps;
    int feature, count;
  };

  __device__ Box next_box() {
    int row, column;
    const Job job = jobs_.next(row, column);
    const int dys = K::block == 64 ? job.rows : K::kDyBoxes, xs = K::block == 64 ? job.count : K::kXBoxes;
    const bool of_dy = lane() < dys;
    const int i = of_dy ? lane() : lane() - dys;  // of its kind: a block, or a half of one
    const int block = K::block != 64 ? 0 : !of_dy ? i : i == 0 ? 0 : job.second;
    row = __shfl_sync(~0u, row, block), column = __shfl_sync(~0u, column, block);
    const int feature = (of_dy ? row : column) * K::block + (K::block == 64 ? 0 : i * K::kWidth);
    return {of_dy ? g_.dy : g_.x, feature, dys + xs};
  }

  __device__ void fill(const Box& box) const {
    const StepPlace<K::kTokens> at(g_.steps, ahead_);
    if (lane() == 0) {
      shared_.ring.wait_empty(place_);
      shared_.ring.expect(place_, static_cast<uint32_t>(box.count * K::kBox));
    }
    __syncwarp();
    if (lane() < box.count) {
      const uint32_t to = place_.in(data_, K::kStageBytes) + static_cast<uint32_t>(lane() * K::kBox);
      ptx::load_box(to, box.maps + at.term, shared_.ring.full(place_), box.feature, at.token);
    }
    __syncwarp();
  }

  __device__ void advance() {
    ahead_ += K::kFeeders;
    place_.stage += K::kFeeders;
    if (place_.stage >= K::kStages) place_.stage -= K::kStages, place_.parity ^= 1;
  }

  const typename K::KernelArgs& g_;
  Jobs<K> jobs_;
  Shared<K>& shared_;
  uint32_t data_;
  int ahead_;  // steps from the next one that anybody fills to the next that is this warp's
  cuda::RingPlace place_;
};

}  // namespace
}  // namespace blocksparse::gemm::wgrad_range
