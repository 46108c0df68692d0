// The last step of the kernel `many`: sums of a warpgroup to y, by way of shared memory.
#pragma once

#include "cuda/ptx/approximate.h"
#include "cuda/ptx/stmatrix.h"
#include "ops/linear/cuda_many_feed.h"
#include "ops/linear/cuda_many_maps.h"

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

// Where an element of sums(v) lies in a box: row and column of the sums, columns from 8 v on.
struct InSums {
  int row, column;
  __device__ InSums(int v, int i) {
    const auto thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
    row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
    column = 8 * v + i / 4 * 8 + lane % 4 * 2 + i % 2;
  }
};

// One box by a warpgroup to shared memory, rounded. sums(v): of 64 x 64, this lane's in columns 8 v ... 8 v + 15.
// Turned: columns of the sums become rows of the box.
template <class T, bool Turned, class Sums>
__device__ inline void stage_box(uint32_t box, Sums sums) {
  const auto thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32;
  const int matrix = lane / 8;
#pragma unroll
  for (int v = 0; v < 8; v += 2) {
    const float* sum = sums(v);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = narrow_pair(sum[2 * i], sum[2 * i + 1], T{});
    if constexpr (Turned) {
      const int row = 8 * (v + matrix / 2) + lane % 8;
      ptx::stmatrix_x4_trans(in_box(box, row, warp * 2 + matrix % 2), words);
    } else {
      const int row = warp * 16 + matrix % 2 * 8 + lane % 8;
      ptx::stmatrix_x4(in_box(box, row, v + matrix / 2), words);
    }
  }
}

// Columns of the sums are outputs, or, Transposed, tokens. All of the bias is under way before any of it is added.
template <class T, bool Transposed, class Sums>
__device__ inline void add_bias(const ManyProduct& p, ManyCorner at, Sums sums) {
  constexpr int kGroups = Transposed ? 1 : 4, kEach = Transposed ? 2 : 4;  // a lane's outputs
  const auto* from = static_cast<const T*>(p.finish.bias);
  float bias[kGroups][kEach];
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const InSums in(2 * group, Transposed ? 2 * k : k / 2 * 4 + k % 2);
      const int64_t output = at.output + (Transposed ? in.row : in.column);
      bias[group][k] = output < p.outputs ? widen(from[output]) : 0;
    }
  }
#pragma unroll
  for (int v = 0; v < 8; v += 2) {
    float* sum = sums(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += Transposed ? bias[0][i / 2 % 2] : bias[v / 2][i / 4 * 2 + i % 2];
  }
}

template <class T, bool Transposed, class Sums>
__device__ inline void add_residual(const ManyProduct& p, ManyCorner at, Sums sums) {
  const DeviceMatrix& r = p.finish.residual;
  const auto* from = static_cast<const T*>(r.data);
#pragma unroll
  for (int v = 0; v < 8; v += 2) {
    float* sum = sums(v);
    float more[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const InSums in(v, i);
      const int64_t token = at.token + (Transposed ? in.column : in.row);
      const int64_t output = at.output + (Transposed ? in.row : in.column);
      const bool inside = token < p.n && output < p.outputs;
      more[i] = inside ? widen(from[token * r.token_stride + output * r.feature_stride]) : 0;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += more[i];
  }
}

// For 16 bits: within 1e-5 of the result, without a branch, so that those of many sums overlap. erfcf and a true
// division have one, and gelu then took longer than the product (b = 64, density .25, n = 4096: 82 us beside 78).
template <Activation Act>
__device__ inline float approximately_activated(float z) {
  if constexpr (Act == Activation::relu) return z < 0 ? 0 : z;
  if constexpr (Act == Activation::silu) return z * ptx::rcp(1 + ptx::ex2(-1.44269504f * z));
  if constexpr (Act == Activation::gelu) {
    // erfc(u) = t 2^(P(t) - u^2 log2(e)) with t = 1 / (1 + u / 2), P fitted by Chebyshev polynomials to u = 10.
    const float u = fabsf(z) * 0.707106781f, t = ptx::rcp(1 + 0.5f * u);
    float power = 0.332664911f;
    power = power * t - 1.0313045f;
    power = power * t + 0.694324586f;
    power = power * t + 0.361573871f;
    power = power * t + 1.47012405f;
    power = power * t - 1.82737108f;
    const float tail = 0.5f * t * ptx::ex2(power - u * u * 1.44269504f);  // Phi(-|z|)
    return z < 0 ? z * tail : z - fminf(z, 1e4f) * tail;  // tail is 0 long before 1e4, and Inf stays Inf
  }
  return z;
}

// All sums of a box by straight code. A loop that read them back from shared memory, an element after the other, took
// 60 us for a bias.
template <Activation Act, class Sums>
__device__ inline void activate(Sums sums) {
#pragma unroll
  for (int v = 0; v < 8; v += 2) {
    float* sum = sums(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = approximately_activated<Act>(sum[i]);
  }
}

// A box whose rows are y's, an element at a time where 8 of them are not inside and aligned.
template <class T>
__device__ inline void copy_box(const ManyProduct& p, uint32_t box, ManyCorner at, bool rows_are_outputs) {
  const int64_t rows = rows_are_outputs ? p.outputs - at.output : p.n - at.token;
  const int64_t columns = rows_are_outputs ? p.n - at.token : p.outputs - at.output;
  const DeviceMatrix& y = p.finish.y;
  const int64_t pitch = rows_are_outputs ? y.feature_stride : y.token_stride;
  const int64_t step = rows_are_outputs ? y.token_stride : y.feature_stride;
  T* corner = p.finish.at<T>(at.token, at.output);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % 128; i < kBox * kBox / 8; i += 128) {
    const int row = i / 8, vector = i % 8;
    const int64_t inside = columns - 8 * vector;
    if (row >= rows || inside <= 0) continue;
    const int4 words = ptx::ld_shared_16(in_box(box, row, vector));
    T* to = corner + row * pitch + 8 * vector * step;
    if (step == 1 && inside >= 8 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
      *reinterpret_cast<int4*>(to) = words;
      continue;
    }
    const int of[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k < inside) to[k * step].bits = static_cast<uint16_t>(static_cast<uint32_t>(of[k / 2]) >> 16 * (k % 2));
    }
  }
}

template <class T, int Buffers, bool Transposed, bool Plain, XOrder Order, class Sums>
__device__ inline void store_box_of_sums(const ManyProduct& p, const ManyY<Order>& y, uint32_t box, int group,
                                         ManyCorner at, Sums sums) {
  if constexpr (!Plain) {
    if (p.finish.bias != nullptr) add_bias<T, Transposed>(p, at, sums);
    if (p.finish.residual.data != nullptr) add_residual<T, Transposed>(p, at, sums);
    switch (p.finish.activation) {
      case Activation::none: break;
      case Activation::relu: activate<Activation::relu>(sums); break;
      case Activation::gelu: activate<Activation::gelu>(sums); break;
      case Activation::silu: activate<Activation::silu>(sums); break;
    }
  }
  const bool leads = threadIdx.x % 128 == 0;
  if (leads) ptx::bulk_wait_read<Buffers - 1>();
  ptx::bar_sync(1 + group, 128);
  const bool rows_are_outputs = !Plain && !p.finish.y.features_contiguous();
  if (rows_are_outputs) stage_box<T, !Transposed>(box, sums);
  else stage_box<T, Transposed>(box, sums);
  ptx::fence_async_shared();
  ptx::bar_sync(1 + group, 128);
  if (!Plain && !p.boxes) {
    copy_box<T>(p, box, at, rows_are_outputs);
  } else if (leads) {
    store_many_y(y, box, at.output, at.token, rows_are_outputs);
    ptx::bulk_commit();
  }
}

}  // namespace
}  // namespace blocksparse::linear
