// What a thread block of the kernel `wgrad_block` does, and the warp that fills its ring of stages.
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

template <int Terms>
struct Args {
  CUtensorMap x[Terms], dy[Terms];  // of each (x, dy) of a list
  TermSteps<Terms> steps;
  DeviceWalk by_out, by_in;
  const int32_t* out_of;  // the row of each block
  GradientTarget target;
  const void* w;  // if the gates' gradients are wanted
  float* dgates;  // null: they are not
  int32_t blocks;
  int64_t outputs, inputs;
};

// First: x and dy are features-first. Terms: the (x, dy) of a launch, at most; one alone has a kernel of its own.
template <class T, int Block, bool First, int Terms>
struct Kernel {
  using Element = T;
  using KernelArgs = Args<Terms>;
  static constexpr int block = Block;
  static constexpr bool first = First;
  static constexpr int kBlocks = Block == 32 ? 4 : Block == 64 ? 2 : 1;  // of dW
  static constexpr int kParts = Block == 128 ? 2 : 1;                    // thread blocks of a block of dW
  static constexpr int kTokens = 64;                                     // of a stage
  static constexpr int kWidth = Block == 32 ? 32 : 64;                   // features of a box
  static constexpr int kBox = kTokens * kWidth * 2;
  static constexpr int kDyBoxes = kBlocks, kXBoxes = Block == 128 ? 2 : kBlocks;  // at most
  static constexpr int kBoxes = kDyBoxes + kXBoxes;
  static constexpr int kResident = 3;
  static constexpr int kRoom = (228 * 1024 / kResident - 2048) / kBox;  // boxes
  static constexpr int kMostStages = 6;
  static constexpr int kSharedBytes = kRoom * kBox;
  static constexpr int kThreads = 128 + 32;
};

// ---- Device ---------------------------------------------------------------------------------------------------------

// What a thread block does.
template <class K>
struct Job {
  int id[K::kBlocks], row[K::kBlocks], column[K::kBlocks];  // id -1: there is none
  bool same[K::kBlocks];  // its x (b = 32) or dy (b = 64) is that of the block in front

  template <class Args>
  __device__ explicit Job(const Args& g) {
    const int first = static_cast<int>(blockIdx.x) / K::kParts * K::kBlocks;
#pragma unroll
    for (int r = 0; r < K::kBlocks; ++r) {
      const int at = min(first + r, g.blocks - 1);
      if constexpr (K::block == 32) {
        const BlockRef ref = g.by_in.refs[at];
        id[r] = ref.weight, row[r] = ref.from;
      } else {
        id[r] = at, row[r] = g.out_of[at];
      }
    }
#pragma unroll
    for (int r = 0; r < K::kBlocks; ++r) column[r] = g.by_out.refs[id[r]].from;
#pragma unroll
    for (int r = 0; r < K::kBlocks; ++r) {
      same[r] = r > 0 && (K::block == 32 ? column[r] == column[r - 1] : row[r] == row[r - 1]);
      same[r] = __shfl_sync(~0u, static_cast<int>(same[r]), 0) != 0;
      if (first + r >= g.blocks) id[r] = -1;
    }
  }
};

// Fills the stages of the ring with the boxes that are needed, dy first.
template <class K>
class Loader {
 public:
  __device__ Loader(const typename K::KernelArgs& g, const Job<K>& job) : g_(g) {
#pragma unroll
    for (int i = 0; i < K::kBoxes; ++i) {
      const bool of_dy = i < K::kDyBoxes;
      if constexpr (K::block == 128) {
        feature_[i] =
            of_dy ? job.row[0] * 128 + static_cast<int>(blockIdx.x) % 2 * 64 : job.column[0] * 128 + (i - 1) * 64;
        needed_[i] = true;
      } else {
        const int r = of_dy ? i : i - K::kDyBoxes;
        feature_[i] = (of_dy ? job.row[r] : job.column[r]) * K::block;
        needed_[i] = (K::block == 32) == of_dy || !job.same[r];
      }
    }
  }

  // A thread.
  __device__ void run(const cuda::Ring<K::kMostStages>& ring, uint32_t data) const {
    const int bytes = count() * K::kBox, stages = stages_of(count());
    cuda::RingPlace place;
#pragma unroll 1
    for (int step = 0; step < g_.steps.all(); ++step, place.advance(stages)) {
      ring.wait_empty(place);
      load(ring, place, place.in(data, bytes), step);
    }
  }
  __device__ static int stages_of(int boxes) { return min(K::kRoom / boxes, K::kMostStages); }

  // Boxes lie one behind the other, those that are not needed nowhere.
  __device__ void load(const cuda::Ring<K::kMostStages>& ring, const cuda::RingPlace& place, uint32_t to,
                       int step) const {
    const StepPlace<K::kTokens> at(g_.steps, step);
    const uint32_t full = ring.full(place);
    ring.expect(place, static_cast<uint32_t>(count() * K::kBox));
#pragma unroll
    for (int i = 0; i < K::kBoxes; ++i) {
      if (!needed_[i]) continue;
      const CUtensorMap* map = (i < K::kDyBoxes ? g_.dy : g_.x) + at.term;
      if constexpr (K::first) ptx::load_box(to, map, full, at.token, feature_[i]);
      else ptx::load_box(to, map, full, feature_[i], at.token);
      to += K::kBox;
    }
  }

  __device__ int count() const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < K::kBoxes; ++i) count += needed_[i] ? 1 : 0;
    return count;
  }
  // Where in a stage a box lies, or, where that is not needed, the one in front of it.
  __device__ int place_of(int box) const {
    int at = -1;
#pragma unroll
    for (int i = 0; i < K::kBoxes; ++i) {
      if (i <= box && needed_[i]) ++at;
    }
    return at;
  }

 private:
  const typename K::KernelArgs& g_;
  int feature_[K::kBoxes];
  bool needed_[K::kBoxes];
};

}  // namespace
}  // namespace blocksparse::gemm::wgrad_block
