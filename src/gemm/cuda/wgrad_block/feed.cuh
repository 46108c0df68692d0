// What a thread block of the kernel `wgrad_block` does, and the warp that fills its ring of stages.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/copy.h"
#include "cuda/ring.h"
#include "gemm/cuda/gradient_target.cuh"
#include "gemm/cuda/wgrad_block/plan.h"

namespace blocksparse::gemm::wgrad_block {
namespace {

using ptx::shared_address;

// ---- Config ---------------------------------------------------------------------------------------------------------

struct Args {
  CUtensorMap x, dy;
  const BlockRef* refs;   // of the rows of W
  const int32_t* out_of;  // the row of each block
  GradientTarget target;
  int32_t blocks, steps;
  int64_t outputs, inputs;
};

template <class T, int Block>
struct Kernel {
  using Element = T;
  static constexpr int block = Block;
  static constexpr int kBlocks = Block == 64 ? 2 : 1;  // of dW
  static constexpr int kParts = Block == 64 ? 1 : 2;   // thread blocks of a block of dW
  static constexpr int kTokens = 64;                   // of a stage
  static constexpr int kWidth = 64;                    // features of a box
  static constexpr int kBox = kTokens * kWidth * 2;
  static constexpr int kDyBoxes = kBlocks, kXBoxes = 2, kBoxes = kDyBoxes + kXBoxes;  // at most
  static constexpr int kResident = 3;
  static constexpr int kRoom = (228 * 1024 / kResident - 2048) / kBox;  // boxes
  static constexpr int kMostStages = 6;
  static constexpr int kSharedBytes = kRoom * kBox;
  static constexpr int kThreads = 128 + 32;
};

// ---- Device ---------------------------------------------------------------------------------------------------------

// What a thread block does: blocks `first` and, b = 64, the next one.
template <class K>
struct Job {
  int first, count;
  int row[K::kBlocks], column[K::kBlocks];
  bool same;  // the second block's dy is that of the first

  __device__ explicit Job(const Args& g) {
    first = static_cast<int>(blockIdx.x) / K::kParts * K::kBlocks;
    count = min(K::kBlocks, g.blocks - first);
#pragma unroll
    for (int r = 0; r < K::kBlocks; ++r) {
      const int at = min(first + r, g.blocks - 1);
      row[r] = g.out_of[at], column[r] = g.refs[at].from;
    }
    same = __shfl_sync(~0u, static_cast<int>(row[K::kBlocks - 1] == row[0]), 0) != 0;
  }
};

// Fills the stages of the ring with the boxes that are needed, dy first.
template <class K>
class Loader {
 public:
  __device__ Loader(const Args& g, const Job<K>& job) : g_(g), second_dy_(K::block == 64 && !job.same) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int block = K::block == 64 ? i : 0;
      dy_[i] = job.row[block] * K::block + (K::block == 64 ? 0 : static_cast<int>(blockIdx.x) % 2 * 64);
      x_[i] = job.column[block] * K::block + (K::block == 64 ? 0 : i * 64);
    }
  }

  // A thread.
  __device__ void run(const cuda::Ring<K::kMostStages>& ring, uint32_t data) const {
    const int bytes = boxes() * K::kBox;
    cuda::RingPlace place;
#pragma unroll 1
    for (int step = 0; step < g_.steps; ++step, place.advance(stages())) {
      const uint32_t full = ring.full(place);
      uint32_t to = place.in(data, bytes);
      ring.wait_empty(place);
      ring.expect(place, static_cast<uint32_t>(bytes));
      const auto load = [&](const CUtensorMap& map, int feature) {
        ptx::load_box(to, &map, full, feature, step * K::kTokens);
        to += K::kBox;
      };
      load(g_.dy, dy_[0]);
      if (second_dy_) load(g_.dy, dy_[1]);
      load(g_.x, x_[0]);
      load(g_.x, x_[1]);
    }
  }

  // Of a stage. Boxes lie one behind the other.
  __device__ int boxes() const { return second_dy_ ? 4 : 3; }
  __device__ int stages() const { return min(K::kRoom / boxes(), K::kMostStages); }

 private:
  const Args& g_;
  bool second_dy_;
  int dy_[2], x_[2];  // features
};

}  // namespace
}  // namespace blocksparse::gemm::wgrad_block
