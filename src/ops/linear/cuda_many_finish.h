// The last step of the kernel `many`: sums of a warpgroup to y, by way of shared memory.
#pragma once

#include "cuda/ptx/stmatrix.h"
#include "ops/linear/cuda_many_feed.h"

namespace blocksparse::linear {
namespace {

inline constexpr int kBox = 64;  // y is stored in boxes of 64 tokens x 64 outputs
inline constexpr int kBoxBytes = kBox * kBox * 2;

struct ManyCorner {
  int token, output;
};

// Where 16 bytes, 8 elements from `vector` on, of row `row` lie in a box swizzled in 128 bytes.
__device__ inline uint32_t in_box(uint32_t box, int row, int vector) {
  return box + static_cast<uint32_t>(row * 128 + ((vector ^ (row & 7)) << 4));
}

// One box by a warpgroup. sums(v): of 64 x 64, this lane's in columns 8 v ... 8 v + 15. Columns of the sums are
// outputs, or, Transposed, tokens.
template <class T, int Buffers, bool Transposed, class Sums>
__device__ inline void store_plain_box(const CUtensorMap* y, uint32_t box, int group, ManyCorner at, Sums sums) {
  const auto thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32;
  const int matrix = lane / 8;
  if (thread == 0) ptx::bulk_wait_read<Buffers - 1>();
  ptx::bar_sync(1 + group, 128);
#pragma unroll
  for (int v = 0; v < 8; v += 2) {
    const float* sum = sums(v);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = narrow_pair(sum[2 * i], sum[2 * i + 1], T{});
    if constexpr (Transposed) {
      const int row = 8 * (v + matrix / 2) + lane % 8;
      ptx::stmatrix_x4_trans(in_box(box, row, warp * 2 + matrix % 2), words);
    } else {
      const int row = warp * 16 + matrix % 2 * 8 + lane % 8;
      ptx::stmatrix_x4(in_box(box, row, v + matrix / 2), words);
    }
  }
  ptx::fence_async_shared();
  ptx::bar_sync(1 + group, 128);
  if (thread != 0) return;
  ptx::store_box(y, box, at.output, at.token);
  ptx::bulk_commit();
}

// f32 [64, 32] in the place of a box, so that rows and columns are read without meeting in a bank.
struct StagedSums {
  float* data;
  __device__ float& at(int row, int column) const { return data[row * 32 + (column ^ (row & 31))]; }
};

// Half a box to y, two outputs beside each other at a time where y has them so, with all that may become of a sum. gelu
// adds 100 us to 80 (b = 64, density .25, n = 4096), for no product runs meanwhile; by a shorter formula as much.
template <class T, bool Transposed, Activation Act>
__device__ inline void finish_staged(const ManyProduct& p, const StagedSums& staged, ManyCorner at) {
  constexpr int kOutputs = Transposed ? kBox : 32, kTokens = Transposed ? 32 : kBox;
  const auto thread = static_cast<int>(threadIdx.x) % 128;
  const auto sum_at = [&](int token, int output) {
    return Transposed ? staged.at(output, token) : staged.at(token, output);
  };
#pragma unroll 1
  for (int e = thread; e < kOutputs * kTokens / 2; e += 128) {
    const int output = p.pairs ? e % (kOutputs / 2) * 2 : e / kTokens * 2;
    const int token = p.pairs ? e / (kOutputs / 2) : e % kTokens;
    const int64_t y_token = at.token + token, y_output = at.output + output;
    if (y_token >= p.n || y_output >= p.outputs) continue;
    const auto value = [&](int next) {
      const float sum = p.finish.before_activation<T>(y_token, y_output + next, sum_at(token, output + next));
      return narrow<T>(activated(Act, sum));
    };
    const T low = value(0);
    if (y_output + 1 == p.outputs) {
      *p.finish.at<T>(y_token, y_output) = low;
      continue;
    }
    const T high = value(1);
    if (p.pairs) {
      *reinterpret_cast<uint32_t*>(p.finish.at<T>(y_token, y_output)) = low.bits | static_cast<uint32_t>(high.bits)
                                                                                       << 16;
    } else {
      *p.finish.at<T>(y_token, y_output) = low;
      *p.finish.at<T>(y_token, y_output + 1) = high;
    }
  }
}

template <class T, bool Transposed, class Sums>
__device__ inline void store_any_box(const ManyProduct& p, float* place, int group, ManyCorner at, Sums sums) {
  const auto thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32;
  const StagedSums staged{place};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ptx::bar_sync(1 + group, 128);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      staged.at(row, column) = sums(half * 4 + i / 8 * 2)[i % 8];
    }
    ptx::bar_sync(1 + group, 128);
    const ManyCorner corner{at.token + (Transposed ? 32 * half : 0), at.output + (Transposed ? 0 : 32 * half)};
    switch (p.finish.activation) {
      case Activation::none: finish_staged<T, Transposed, Activation::none>(p, staged, corner); break;
      case Activation::relu: finish_staged<T, Transposed, Activation::relu>(p, staged, corner); break;
      case Activation::gelu: finish_staged<T, Transposed, Activation::gelu>(p, staged, corner); break;
      case Activation::silu: finish_staged<T, Transposed, Activation::silu>(p, staged, corner); break;
    }
  }
}

template <class T, int Buffers, bool Transposed, bool Plain, class Sums>
__device__ inline void store_box_of_sums(const ManyProduct& p, const CUtensorMap* y, char* box, int group,
                                         ManyCorner at, Sums sums) {
  if constexpr (Plain) store_plain_box<T, Buffers, Transposed>(y, shared_address(box), group, at, sums);
  else store_any_box<T, Transposed>(p, reinterpret_cast<float*>(box), group, at, sums);
}

}  // namespace
}  // namespace blocksparse::linear
