// What a warp of the kernel `w_in_smem` does with 32 tokens x 32 outputs, and where W lies in shared memory.
#pragma once

#include "cuda/ptx/bulk_copy.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/movmatrix.h"
#include "cuda/turn_quad.h"
#include "gemm/cuda/w_in_smem/plan.h"
#include "gemm/cuda/wgmma/finish.cuh"

namespace blocksparse::gemm::w_in_smem {
namespace {

struct Args {
  CUtensorMap x, y;
  Plan plan;
  DeviceWalk walk;
  const void* w;
  int32_t blocks, rows;  // rows of blocks
  int32_t inputs, outputs, n;
  bool boxes;  // y can be stored in boxes
  bool early;  // W may be read before the kernel before has ended
  Finish finish;

  __device__ uint32_t chunk_bytes() const { return static_cast<uint32_t>(plan.tokens * wgmma::kChunk * 2); }
};

template <class T, int B, bool ByIn>
struct Kernel {
  using Element = T;
  static constexpr bool by_in = ByIn;
  static constexpr int block = B, kPitch = B * 2, kBlockBytes = B * kPitch, kVectors = B / 8;  // kVectors: of a row
  static constexpr int kRows = kSide / B;  // rows of blocks of a warp tile

  // The other 16 bytes of its row that a vector is exchanged with. 8 rows, one below the other, then meet all banks.
  __device__ static int swizzle(int row) { return row * kPitch / 128 & (kVectors - 1); }
};

// Blocks of a row lie side by side, in the order of the walk.
struct Weights {
  uint32_t blocks;
  const uint32_t* offsets;  // of each block: where its x lies in a tile, 64 inputs in lines of 128 bytes
  const int32_t* starts;    // [rows + 1]
  int32_t rows;
};

struct Sums {
  float of[2][4][4];  // 16 tokens, 8 outputs, in mma.sync's order
};

// Copies one block, by a warp. Inputs beyond the edge become zeros, because W may hold anything there.
template <class K>
__device__ inline void copy_block(const Args& p, uint32_t to, BlockRef ref) {
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  const int left = p.inputs - ref.from * K::block;
  const auto* block = static_cast<const uint16_t*>(p.w) + int64_t{ref.weight} * (K::block * K::block);
#pragma unroll
  for (int v = lane; v < K::block * K::kVectors; v += 32) {
    const int row = v / K::kVectors, vector = v % K::kVectors;
    const int inside = K::by_in ? (row < left ? 8 : 0) : min(max(left - 8 * vector, 0), 8);
    const int place = row * K::kVectors + (vector ^ K::swizzle(row));
    ptx::cp_async_16_at(to + static_cast<uint32_t>(place * 16), block + 8 * v, 2 * inside);
  }
}

// Called by all multiplying warps. Thread blocks begin at different blocks, otherwise all of them would ask for the
// same lines at once.
template <class K>
__device__ inline Weights copy_weights(const Args& p, char* to) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  auto* offsets = reinterpret_cast<uint32_t*>(to + p.plan.w_bytes);
  auto* starts = reinterpret_cast<int32_t*>(offsets + p.blocks + 1);
  const uint32_t blocks = ptx::shared_address(to);
  const auto begin = static_cast<int>(blockIdx.x * static_cast<unsigned>(p.blocks) / gridDim.x);
  for (int first = warp; first < p.blocks; first += 32 * kWarps) {
    const int mine = first + lane * kWarps, index = mine + begin - (mine + begin < p.blocks ? 0 : p.blocks);
    BlockRef ref{0, 0};
    if (mine < p.blocks) {
      ref = p.walk.refs[index];
      const int input = ref.from * K::block;
      offsets[index] = static_cast<uint32_t>(input / wgmma::kChunk) * p.chunk_bytes() +
                       static_cast<uint32_t>(input % wgmma::kChunk * 2);
    }
    for (int k = 0; k < 32 && first + k * kWarps < p.blocks; ++k) {
      const BlockRef of{__shfl_sync(~0u, ref.from, k), __shfl_sync(~0u, ref.weight, k)};
      copy_block<K>(p, blocks + static_cast<uint32_t>(__shfl_sync(~0u, index, k) * K::kBlockBytes), of);
    }
  }
  ptx::cp_async_commit();
  if (thread == 0) offsets[p.blocks] = 0;
  for (int i = thread; i <= p.rows; i += 32 * kWarps) starts[i] = p.walk.starts[i];
  ptx::cp_async_wait<0>();
  ptx::bar_sync(1, 32 * kWarps);
  return {blocks, offsets, starts, p.rows};
}

// The row of a matrix that a lane gives to ldmatrix, and the half of its 16 columns.
struct Lane {
  uint32_t x, w;

  template <class K>
  __device__ static Lane of() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (K::block == 8) return {of_x(lane, 0), static_cast<uint32_t>(lane * 4)};
    const int row = K::by_in ? lane % 16 : lane / 16 * 8 + lane % 8, half = K::by_in ? lane / 16 : lane / 8 % 2;
    return {of_x(lane % 16, lane / 16), static_cast<uint32_t>(row * K::kPitch + (half ^ K::swizzle(row)) * 16)};
  }

 private:
  __device__ static uint32_t of_x(int row, int half) {
    return static_cast<uint32_t>(row * 128 + (half ^ row % 8) * 16);
  }
};

// Multiplies a block of at least 16 x 16. `row` counts the warp tile's rows of blocks.
template <class K>
__device__ inline void multiply_block(uint32_t x, uint32_t w, int row, Sums& sums) {
  using T = typename K::Element;
  constexpr int kParts = K::block / 16;
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
    uint32_t of_x[2][4], of_w[kParts][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) ptx::ldmatrix_x4_at(of_x[m], (x ^ (32 * k)) + m * 16 * 128);
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      if constexpr (K::by_in) ptx::ldmatrix_x4_trans_at(of_w[j], (w + k * 16 * K::kPitch) ^ (32 * j));
      else ptx::ldmatrix_x4_at(of_w[j], (w + j * 16 * K::kPitch) ^ (32 * k));
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int j = 0; j < 2 * kParts; ++j) {
        const uint32_t b[2] = {of_w[j / 2][j % 2 * 2], of_w[j / 2][j % 2 * 2 + 1]};
        ptx::mma_m16n8k16(sums.of[m][row * 2 * kParts + j], of_x[m], b, T{});
      }
    }
  }
}

// Multiplies a block of 8 x 8: one ldmatrix loads all 32 tokens, and a lane has one word of W.
template <class K>
__device__ inline void multiply_small_block(uint32_t x, uint32_t w, int row, Sums& sums) {
  uint32_t of_x[4];
  ptx::ldmatrix_x4_at(of_x, x);
  uint32_t of_w = __float_as_uint(ptx::ld_shared_4(w));
  if constexpr (K::by_in) of_w = ptx::movmatrix_trans(of_w);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    ptx::mma_m16n8k8(sums.of[m][row], of_x[2 * m], of_x[2 * m + 1], of_w, typename K::Element{});
  }
}

// x: the warp tile's tokens in the first chunk of inputs.
template <class K>
__device__ inline void multiply_tile(const Weights& w, const Lane& lane, uint32_t x, int strip, Sums& sums) {
#pragma unroll
  for (int r = 0; r < K::kRows; ++r) {
    const int row = min(strip * K::kRows + r, w.rows);
    int i = w.starts[row];
    const int last = w.starts[min(row + 1, w.rows)];
    uint32_t next = w.offsets[i];
#pragma unroll 2
    for (; i < last; ++i) {
      const uint32_t offset = next;
      next = w.offsets[i + 1];
      const uint32_t from = (x + lane.x + (offset & ~127u)) ^ (offset & 127);
      const uint32_t block = w.blocks + static_cast<uint32_t>(i * K::kBlockBytes) + lane.w;
      if constexpr (K::block == 8) multiply_small_block<K>(from, block, r, sums);
      else multiply_block<K>(from, block, r, sums);
    }
  }
}

// ---- Finish ---------------------------------------------------------------------------------------------------------

// Reads 8 outputs of a token, of which `inside` exist.
template <class T>
__device__ inline void read_eight(const DeviceMatrix& m, int64_t token, int64_t output, int64_t inside,
                                  uint32_t (&words)[4]) {
  const T* from = m.at<T>(token, output);
  if (m.aligned && m.features_contiguous() && inside >= 8) return ptx::ld_16(words, from);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const uint32_t bits = k < inside ? from[k * m.feature_stride].bits : 0;
    words[k / 2] = k % 2 == 0 ? bits : words[k / 2] | bits << 16;
  }
}

template <class T>
__device__ inline void write_eight(const DeviceMatrix& m, int64_t token, int64_t output, int64_t inside,
                                   const uint32_t (&words)[4]) {
  T* to = m.at<T>(token, output);
  if (m.aligned && m.features_contiguous() && inside >= 8) {
    *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (k < inside) to[k * m.feature_stride].bits = static_cast<uint16_t>(words[k / 2] >> 16 * (k % 2));
  }
}

template <class T>
__device__ inline void add_bias(const Args& p, int output, Sums& sums) {
  const auto* bias = static_cast<const T*>(p.finish.bias);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int column = output + i / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
    const float of = column < p.outputs ? widen(bias[column]) : 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) sums.of[k / 2][i / 2][k % 2 * 2 + i % 2] += of;
  }
}

// Calls body(row, token) for the four rows of 8 tokens that a lane has a token of.
template <class Body>
__device__ inline void each_row(int64_t first_token, Body body) {
#pragma unroll
  for (int row = 0; row < 4; ++row) body(row, first_token + row * 8 + static_cast<int>(threadIdx.x) % 32 / 4);
}

// A lane reads 8 outputs of a token. Four lanes exchange them for the columns that they have sums of.
template <class T>
__device__ inline void add_residual(const Args& p, int64_t first_token, int first_output, Sums& sums) {
  const int64_t output = first_output + static_cast<int>(threadIdx.x) % 4 * 8, inside = p.outputs - output;
  each_row(first_token, [&](int row, int64_t token) {
    uint32_t words[4] = {};
    if (token < p.n && inside > 0) read_eight<T>(p.finish.residual, token, output, inside, words);
    cuda::turn_quad(words);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const T value{static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2))};
      sums.of[row / 2][i / 2][row % 2 * 2 + i % 2] += widen(value);
    }
  });
}

// Stores a tile through shared memory by one copy. Exchanged among lanes and stored 16 bytes a lane, as store_tile
// does, it took 42 % of all cycles (b = 32, density .25, 256 features), because of the latency of shuffles.
template <class T>
__device__ inline void store_tile_as_box(const Args& p, uint32_t staged, int first_token, int first_output,
                                         const Sums& sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32, matrix = lane / 8, row = matrix % 2 * 8 + lane % 8;
  const uint32_t to = staged + static_cast<uint32_t>(row * 64 + ((matrix / 2 ^ row / 2 % 4) << 4));
  if (lane == 0) ptx::bulk_wait_read<0>();  // of the warp tile before
  __syncwarp();
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const int m = part / 2, j = part % 2 * 2;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* sum = sums.of[m][j + i / 2] + i % 2 * 2;
      words[i] = narrow_pair(sum[0], sum[1], T{});
    }
    ptx::stmatrix_x4((to + m * 16 * 64) ^ (16 * j), words);
  }
  ptx::fence_async_shared();
  __syncwarp();
  if (lane == 0) {
    ptx::store_box(&p.y, staged, first_output, first_token);
    ptx::bulk_commit();
  }
}

template <class T>
__device__ inline void store_tile(const Args& p, int64_t first_token, int first_output, const Sums& sums) {
  const int64_t output = first_output + static_cast<int>(threadIdx.x) % 4 * 8, inside = p.outputs - output;
  each_row(first_token, [&](int row, int64_t token) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* sum = sums.of[row / 2][i] + row % 2 * 2;
      words[i] = narrow_pair(sum[0], sum[1], T{});
    }
    cuda::turn_quad(words);
    if (token < p.n && inside > 0) write_eight<T>(p.finish.y, token, output, inside, words);
  });
}

template <class T>
__device__ inline void finish_tile(const Args& p, uint32_t staged, int token, int output, Sums& sums) {
  if (p.finish.bias != nullptr) add_bias<T>(p, output, sums);
  if (p.finish.residual.data != nullptr) add_residual<T>(p, token, output, sums);
  const auto all = [&](int v) { return sums.of[v / 4][v % 4]; };
  switch (p.finish.activation) {
    case Activation::none: break;
    case Activation::relu: wgmma::activate<Activation::relu>(all); break;
    case Activation::gelu: wgmma::activate<Activation::gelu>(all); break;
    case Activation::silu: wgmma::activate<Activation::silu>(all); break;
    case Activation::gelu_tanh: wgmma::activate<Activation::gelu_tanh>(all); break;
  }
  if (p.boxes) store_tile_as_box<T>(p, staged, token, output, sums);
  else store_tile<T>(p, token, output, sums);
}

}  // namespace
}  // namespace blocksparse::gemm::w_in_smem
