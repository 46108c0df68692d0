// The last step of the kernel `wgmma`: the sums of a warpgroup become y, through shared memory.
#pragma once

#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/load.h"
#include "cuda/ptx/stmatrix.h"
#include "gemm/cuda/approximate.cuh"
#include "gemm/cuda/wgmma/feed.cuh"
#include "gemm/cuda/wgmma/maps.cuh"

namespace blocksparse::gemm::wgmma {
namespace {

inline constexpr int kBox = 64;  // y is stored in boxes of 64 tokens x 64 outputs
inline constexpr int kBoxBytes = kBox * kBox * 2;

struct Corner {
  int token, output;
};

// The address of 16 bytes (8 elements from `vector` on) of row `row` in a box swizzled in 128 bytes.
__device__ inline uint32_t in_box(uint32_t box, int row, int vector) {
  return box + static_cast<uint32_t>(row * 128 + ((vector ^ (row & 7)) << 4));
}

// The place of an element of sums(v) in a box: row and column of the sums, columns from 8 v on.
struct InSums {
  int row, column;
  __device__ InSums(int v, int i) {
    const auto thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
    row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
    column = 8 * v + i / 4 * 8 + lane % 4 * 2 + i % 2;
  }
};

// The address of the row of the box that this lane gives to stmatrix or ldmatrix for the sums of columns 8 v ... 8 v +
// 15. Turned: columns of the sums are rows of the box.
template <bool Turned>
__device__ inline uint32_t matrix_row(uint32_t box, int v) {
  const auto thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32, matrix = lane / 8;
  if constexpr (Turned) return in_box(box, 8 * (v + matrix / 2) + lane % 8, warp * 2 + matrix % 2);
  return in_box(box, warp * 16 + matrix % 2 * 8 + lane % 8, v + matrix / 2);
}

// Rounds one box and writes it to shared memory, by a warpgroup. sums(v): of 64 x 64, this lane's in columns 8 v ... 8
// v + 15.
template <class T, bool Turned, class Sums>
__device__ inline void stage_box(uint32_t box, Sums sums) {
#pragma unroll
  for (int v = 0; v < 8; v += 2) {
    const float* sum = sums(v);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = narrow_pair(sum[2 * i], sum[2 * i + 1], T{});
    if constexpr (Turned) ptx::stmatrix_x4_trans(matrix_row<Turned>(box, v), words);
    else ptx::stmatrix_x4(matrix_row<Turned>(box, v), words);
  }
}

// Adds what a box holds to the sums.
template <class T, bool Turned, class Sums>
__device__ inline void add_box(uint32_t box, Sums sums) {
#pragma unroll
  for (int v = 0; v < 8; v += 2) {
    float* sum = sums(v);
    uint32_t words[4];
    if constexpr (Turned) ptx::ldmatrix_x4_trans_at(words, matrix_row<Turned>(box, v));
    else ptx::ldmatrix_x4_at(words, matrix_row<Turned>(box, v));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum[i] += widen(T{static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2))});
    }
  }
}

// Columns of the sums are outputs or, Transposed, tokens. All of the bias is under way before any of it is added.
template <class T, bool Transposed, class Sums>
__device__ inline void add_bias(const Args& p, Corner at, Sums sums) {
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

// Calls body(address in the box, first element, step between elements, elements inside) for each 16 bytes of a box that
// are inside the matrix.
template <class T, class Body>
__device__ inline void each_vector(const Args& p, const DeviceMatrix& m, Corner at, uint32_t box, bool rows_are_outputs,
                                   Body body) {
  const int64_t rows = rows_are_outputs ? p.outputs - at.output : p.n - at.token;
  const int64_t columns = rows_are_outputs ? p.n - at.token : p.outputs - at.output;
  const int64_t pitch = rows_are_outputs ? m.feature_stride : m.token_stride;
  const int64_t step = rows_are_outputs ? m.token_stride : m.feature_stride;
  T* corner = m.at<T>(at.token, at.output);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % 128; i < kBox * kBox / 8; i += 128) {
    const int row = i / 8, vector = i % 8;
    const int64_t inside = columns - 8 * vector;
    if (row < rows && inside > 0)
      body(in_box(box, row, vector), corner + row * pitch + 8 * vector * step, step, inside);
  }
}

// Whether a vector is 16 contiguous, aligned bytes of memory.
template <class T>
__device__ inline bool is_whole(const T* first, int64_t step, int64_t inside) {
  return step == 1 && inside >= 8 && reinterpret_cast<uintptr_t>(first) % 16 == 0;
}

// Asks for the residual of a tile's `tokens` x 64 outputs while the first box is waited for.
template <class T>
__device__ inline void prefetch_residual(const Args& p, Corner at, int tokens) {
  const DeviceMatrix& r = p.finish.residual;
  if (r.data == nullptr) return;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % 128; i < tokens; i += 128) {
    const bool rows_are_outputs = !r.features_contiguous();
    const int64_t token = at.token + (rows_are_outputs ? i / kBox * kBox : i);
    const int64_t output = at.output + (rows_are_outputs ? i % kBox : 0);
    if (token < p.n && output < p.outputs) ptx::prefetch_l2(r.at<T>(token, output));
  }
}

// Adds the residual of a box through the box. Read in the order of the sums, one element at a time, it took 120 us at b
// = 64, density .25, n = 4096. Outside the matrix the box keeps its content, for sums that are not stored.
template <class T, bool Transposed, class Sums>
__device__ inline void add_residual(const Args& p, uint32_t box, int group, Corner at, Sums sums) {
  const bool rows_are_outputs = !p.finish.residual.features_contiguous();
  each_vector<T>(p, p.finish.residual, at, box, rows_are_outputs,
                 [](uint32_t to, const T* from, int64_t step, int64_t inside) {
                   if (is_whole(from, step, inside)) {
                     ptx::cp_async_16_at(to, from, 16);
                     return;
                   }
                   uint32_t words[4] = {};
#pragma unroll
                   for (int k = 0; k < 8; ++k) {
                     if (k < inside) words[k / 2] |= static_cast<uint32_t>(from[k * step].bits) << 16 * (k % 2);
                   }
                   ptx::st_shared_16(to, {static_cast<int>(words[0]), static_cast<int>(words[1]),
                                          static_cast<int>(words[2]), static_cast<int>(words[3])});
                 });
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  ptx::bar_sync(1 + group, 128);
  if (rows_are_outputs) add_box<T, !Transposed>(box, sums);
  else add_box<T, Transposed>(box, sums);
  ptx::bar_sync(1 + group, 128);
}

// Activates all sums of a box in straight code. A loop that read them back from shared memory, one element after the
// other, took 60 us for a bias.
template <Activation Act, class Sums>
__device__ inline void activate(Sums sums) {
#pragma unroll
  for (int v = 0; v < 8; v += 2) {
    float* sum = sums(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = approximately_activated<Act>(sum[i]);
  }
}

// Copies a box to y, one element at a time where 8 elements are not inside and aligned.
template <class T>
__device__ inline void copy_box(const Args& p, uint32_t box, Corner at, bool rows_are_outputs) {
  each_vector<T>(p, p.finish.y, at, box, rows_are_outputs, [](uint32_t from, T* to, int64_t step, int64_t inside) {
    const int4 words = ptx::ld_shared_16(from);
    if (is_whole(to, step, inside)) {
      *reinterpret_cast<int4*>(to) = words;
      return;
    }
    const int of[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k < inside) to[k * step].bits = static_cast<uint16_t>(static_cast<uint32_t>(of[k / 2]) >> 16 * (k % 2));
    }
  });
}

// Replaces the gate's sums of a box by f(gate) * up. Rows of the sums are outputs if Transposed: the sums of up then
// follow two on, otherwise four.
template <Activation Act, bool Transposed, class Sums>
__device__ inline void multiply_gates(Sums sums) {
#pragma unroll
  for (int v = 0; v < 8; v += 2) {
    float* sum = sums(v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int gate = Transposed ? i / 2 * 4 + i % 2 : i;
      sum[gate] = approximately_activated<Act>(sum[gate]) * sum[gate + (Transposed ? 2 : 4)];
    }
  }
}

// Writes the box of 64 tokens x 32 features of a gated linear unit to shared memory, four matrices of 8 x 8 at a time.
template <class T, bool Transposed, class Sums>
__device__ inline void stage_glu(uint32_t box, Sums sums) {
  const auto thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32, matrix = lane / 8;
#pragma unroll
  for (int v = 0; v < 8; v += 4) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* sum = sums(v + i / 2 * 2) + (Transposed ? i % 2 * 4 : i % 2 * 2);
      words[i] = narrow_pair(sum[0], sum[1], T{});
    }
    if constexpr (Transposed) ptx::stmatrix_x4_trans(in_box(box, 8 * (v + matrix) + lane % 8, warp), words);
    else ptx::stmatrix_x4(in_box(box, warp * 16 + matrix % 2 * 8 + lane % 8, v / 2 + matrix / 2), words);
  }
}

template <class T>
__device__ inline void copy_glu(const Args& p, uint32_t box, Corner at) {
  constexpr int kVectors = kBox / 16;  // vectors of a token
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % 128; i < kBox * kVectors; i += 128) {
    const int row = i / kVectors, vector = i % kVectors, token = at.token + row;
    const int64_t feature = at.output / 2 + 8 * vector, inside = p.finish.hidden - feature;
    if (token >= p.n || inside <= 0) continue;
    T* to = p.finish.at<T>(token, feature);
    const int4 words = ptx::ld_shared_16(in_box(box, row, vector));
    if (is_whole(to, 1, inside)) {
      *reinterpret_cast<int4*>(to) = words;
      continue;
    }
    const int of[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k < inside) to[k].bits = static_cast<uint16_t>(static_cast<uint32_t>(of[k / 2]) >> 16 * (k % 2));
    }
  }
}

// Stores a box of sums of a gated linear unit, which gives half as many features of y.
template <class T, bool Transposed, class Wait, class Sums>
__device__ inline void store_box_of_glu(const Args& p, uint32_t box, int group, Corner at, Wait wait_for_box,
                                        Sums sums) {
  switch (p.finish.activation) {
    case Activation::none: multiply_gates<Activation::none, Transposed>(sums); break;
    case Activation::relu: multiply_gates<Activation::relu, Transposed>(sums); break;
    case Activation::gelu: multiply_gates<Activation::gelu, Transposed>(sums); break;
    case Activation::silu: multiply_gates<Activation::silu, Transposed>(sums); break;
    case Activation::gelu_tanh: multiply_gates<Activation::gelu_tanh, Transposed>(sums); break;
  }
  wait_for_box();
  stage_glu<T, Transposed>(box, sums);
  ptx::bar_sync(1 + group, 128);
  copy_glu<T>(p, box, at);
}

template <class T, int Buffers, bool Transposed, bool Plain, XOrder Order, class Sums>
__device__ inline void store_box_of_sums(const Args& p, const YMap<Order>& y, uint32_t box, int group, Corner at,
                                         Sums sums) {
  const bool leads = threadIdx.x % 128 == 0;
  const auto wait_for_box = [&] {
    if (leads) ptx::bulk_wait_read<Buffers - 1>();
    ptx::bar_sync(1 + group, 128);
  };
  const bool residual = !Plain && p.finish.residual.data != nullptr;
  if constexpr (!Plain) {
    if (p.finish.bias != nullptr) add_bias<T, Transposed>(p, at, sums);
    if (p.finish.hidden > 0) return store_box_of_glu<T, Transposed>(p, box, group, at, wait_for_box, sums);
    if (residual) {
      wait_for_box();
      add_residual<T, Transposed>(p, box, group, at, sums);
    }
    switch (p.finish.activation) {
      case Activation::none: break;
      case Activation::relu: activate<Activation::relu>(sums); break;
      case Activation::gelu: activate<Activation::gelu>(sums); break;
      case Activation::silu: activate<Activation::silu>(sums); break;
      case Activation::gelu_tanh: activate<Activation::gelu_tanh>(sums); break;
    }
  }
  if (!residual) wait_for_box();
  const bool rows_are_outputs = !Plain && !p.finish.y.features_contiguous();
  if (rows_are_outputs) stage_box<T, !Transposed>(box, sums);
  else stage_box<T, Transposed>(box, sums);
  ptx::fence_async_shared();
  ptx::bar_sync(1 + group, 128);
  if (!Plain && !p.boxes) {
    copy_box<T>(p, box, at, rows_are_outputs);
  } else if (leads) {
    store_y(y, box, at.output, at.token, rows_are_outputs);
    ptx::bulk_commit();
  }
}

}  // namespace
}  // namespace blocksparse::gemm::wgmma
