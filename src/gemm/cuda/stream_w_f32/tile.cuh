// What a warp of the kernel `stream_w_f32` copies to shared memory for one patch, and how it multiplies. A patch is 16
// inputs of W for up to 32 outputs, and of x for all tokens: a part of a block, or two blocks of 8.
//
// Vectors of 16 bytes are permuted in shared memory, so that neither copies nor reads have bank conflicts:
//   x, and W as fprop reads it   rows of 16 inputs, vector v of row r at v ^ (r / 2 % 4)
//   W as dgrad reads it          rows of outputs, that of input k at 4 (k % 4) + k / 4, its vectors exchanged by k / 4
#pragma once

#include "cuda/number.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/shared.h"
#include "gemm/cuda/finish.cuh"
#include "gemm/cuda/stream_w_f32/plan.h"

namespace blocksparse::gemm::stream_w_f32 {
namespace {

struct Args {
  DeviceWalk walk;
  const float *x, *w, *gates;
  uint32_t x_token;   // vectors from token to token
  int32_t n, inputs;  // that exist
  int32_t block, warps;
  int64_t outputs;
  bool plain;  // sums are stored as they are: no bias, residual or activation
  Finish finish;
  float* partial;  // [slots][n][block]; null: no row is split
};

template <int Outputs, int Tokens, bool ByIn>
struct Tile {
  static constexpr int kOutputs = Outputs, kTokens = Tokens, kDepth = 16;
  static constexpr int kBlocks = Outputs == 8 ? 2 : 1;  // blocks of a patch
  static constexpr int kVectors = Outputs / 4;          // vectors of a row of W in dgrad
  static constexpr int kW = Tokens * 64, kGates = kW + Outputs * 64, kBytes = kGates + 16;

  // The row of input k in W as dgrad reads it.
  __device__ static int row_of(int k) { return 4 * (k % 4) + k / 4; }
  __device__ static int swap_of(int k) { return Outputs == 32 ? k / 4 * 2 : Outputs == 16 ? k / 8 * 2 : 0; }
  // The place of a vector in x, and in W as fprop reads it.
  __device__ static int rows_place(int row, int v) { return row * 64 + ((v ^ (row / 2 % 4)) * 16); }
  // The place for row + step, if row is less than the power of 2 that step is a multiple of.
  __device__ static int rows_place(int row, int v, int step) {
    return row * 64 + ((v ^ (row / 2 % 4) ^ (step / 2 % 4)) * 16) + step * 64;
  }
};

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % 32; }

// Starts the copies of patches.
template <class Tile, bool ByIn>
class Copy {
 public:
  __device__ Copy(const Args& p, int strip) : p_(p) {
    const int lane = lane_id();
    const int row = ByIn ? lane / Tile::kVectors : lane / 4, v = ByIn ? lane % Tile::kVectors : lane % 4;
    if constexpr (Tile::kBlocks == 2) w_ = row % 8 * 8 + 4 * (v % 2);
    else w_ = ByIn ? row * p.block + strip * Tile::kOutputs + 4 * v : (strip * Tile::kOutputs + row) * p.block + 4 * v;
  }

  // refs: the blocks of the patch, from < 0 for none; part: which 16 inputs of a block.
  __device__ void operator()(const BlockRef (&refs)[Tile::kBlocks], int part, uint32_t stage) const {
    const int lane = lane_id(), v = lane % 4;
    const BlockRef x_ref = refs[Tile::kBlocks == 2 ? v / 2 : 0];
    const int input = x_ref.from * p_.block + (Tile::kBlocks == 2 ? 4 * (v % 2) : part * 16 + 4 * v);
    const int bytes = x_ref.from < 0 ? 0 : min(max(p_.inputs - input, 0), 4) * 4;
    const float* x = p_.x + max(input, 0);
    const uint32_t to = stage + Tile::rows_place(lane / 4, v);
#pragma unroll
    for (int i = 0; i < Tile::kTokens / 8; ++i) {
      const uint32_t row = static_cast<uint32_t>(min(lane / 4 + 8 * i, p_.n - 1)) * p_.x_token;
      ptx::cp_async_16_at(to + i * 512, x + int64_t{row} * 4, bytes);
    }
    if constexpr (ByIn) {
      copy_rows_of_inputs(refs, part, stage);
    } else {
      const float* w = p_.w + (int64_t{x_ref.weight} * p_.block) * p_.block + w_ + part * 16;
#pragma unroll
      for (int i = 0; i < Tile::kOutputs / 8; ++i) {
        ptx::cp_async_16_at(to + Tile::kW + i * 512, w + i * 8 * p_.block, bytes);
      }
    }
    if (p_.gates != nullptr && lane < Tile::kBlocks) {
      const BlockRef ref = refs[lane % Tile::kBlocks];
      ptx::cp_async_4(stage + Tile::kGates + 4 * lane, p_.gates + ref.weight, ref.from < 0 ? 0 : 4);
    }
  }

 private:
  __device__ void copy_rows_of_inputs(const BlockRef (&refs)[Tile::kBlocks], int part, uint32_t stage) const {
    constexpr int kStep = 32 / Tile::kVectors;  // rows of all lanes
    const int lane = lane_id(), first = lane / Tile::kVectors, v = lane % Tile::kVectors;
    const BlockRef ref = refs[Tile::kBlocks == 2 ? first / 8 : 0];
    const int input = ref.from * p_.block + (Tile::kBlocks == 2 ? first % 8 : part * 16 + first);
    const float* w = p_.w + (int64_t{ref.weight} * p_.block + part * 16) * p_.block + w_;
#pragma unroll
    for (int i = 0; i < Tile::kDepth / kStep; ++i) {
      const int k = first + i * kStep;
      const uint32_t to = stage + Tile::kW + (Tile::row_of(k) * Tile::kVectors + (v ^ Tile::swap_of(k))) * 16;
      const bool there = ref.from >= 0 && input + i * kStep < p_.inputs;
      ptx::cp_async_16_at(to, w + i * kStep * p_.block, there ? 16 : 0);
    }
  }

  const Args& p_;
  int w_;
};

__device__ inline float4 read_vector(uint32_t from) {
  const int4 v = ptx::ld_shared_16(from);
  return {__int_as_float(v.x), __int_as_float(v.y), __int_as_float(v.z), __int_as_float(v.w)};
}

__device__ inline void read_vector(float (&to)[4], uint32_t from) {
  const float4 v = read_vector(from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// Fused multiply-add. A lane has 8 outputs (4 of a tile of 8) and 8 tokens (2 of a tile of 8) for some of the inputs.
// Its bits are assigned so that half-warps read pairs of equal addresses, which shared memory serves at once.
template <class Tile, bool ByIn>
class Sums {
 public:
  static constexpr int kTokens = Tile::kTokens, kOutputs = Tile::kOutputs;
  static constexpr int kMine = kOutputs == 8 ? 4 : 8, kOutputGroups = kOutputs / kMine;
  static constexpr int kTokenGroups = kTokens == 64 ? 8 : 4, kMineTokens = kTokens / kTokenGroups;
  static constexpr int kDepthGroups = 32 / (kOutputGroups * kTokenGroups);

  __device__ Sums() {
    const int lane = lane_id();
    int rest = lane >> 2;
    output_ = lane >> 1 & 1;
    token_ = (lane & 1) | (rest & 1) << 1;
    rest >>= 1;
    if constexpr (kOutputGroups == 4) output_ |= (rest & 1) << 1, rest >>= 1;
    if constexpr (kTokenGroups == 8) token_ |= (rest & 1) << 2, rest >>= 1;
    depth_ = rest;
  }

  __device__ void add(uint32_t stage, bool gated) {
#pragma unroll 1
    for (int step = 0; step < 4 / kDepthGroups; ++step) {
      const int v = depth_ * (4 / kDepthGroups) + step;
      const float gate = gated ? ptx::ld_shared_4(stage + Tile::kGates + (Tile::kBlocks == 2 ? v / 2 * 4 : 0)) : 1;
      if (gate == 0) continue;
      float w[kMine][4];
      load_w(w, stage + Tile::kW, v);
      if (gated) {
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
#pragma unroll
          for (int c = 0; c < 4; ++c) w[i][c] *= gate;
        }
      }
#pragma unroll
      for (int j = 0; j < kMineTokens; ++j) {
        float x[4];
        read_vector(x, stage + Tile::rows_place(token_, v, kTokenGroups * j));
#pragma unroll
        for (int c = 0; c < 4; ++c) {
#pragma unroll
          for (int i = 0; i < kMine; ++i) sum_[j][i] = fmaf(w[i][c], x[c], sum_[j][i]);
        }
      }
    }
  }

  // The sums of the groups of inputs are added on the way.
  template <class Body>
  __device__ void for_each(Body body) const {
#pragma unroll
    for (int j = 0; j < kMineTokens; ++j) {
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        float sum = sum_[j][i];
#pragma unroll
        for (int bit = 16; bit > 16 / kDepthGroups; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
        const int output = ByIn ? 4 * (output_ + kOutputGroups * (i / 4)) + i % 4 : output_ + kOutputGroups * i;
        if (depth_ == 0) body(token_ + kTokenGroups * j, output, sum);
      }
    }
  }

 private:
  __device__ void load_w(float (&w)[kMine][4], uint32_t from, int v) const {
    if constexpr (!ByIn) {
#pragma unroll
      for (int i = 0; i < kMine; ++i) read_vector(w[i], from + Tile::rows_place(output_, v, kOutputGroups * i));
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {  // input 4 v + c
        const int row = 4 * c + v, swap = Tile::swap_of(4 * v);
#pragma unroll
        for (int part = 0; part < kMine / 4; ++part) {
          float f[4];
          read_vector(f, from + (row * Tile::kVectors + ((output_ + kOutputGroups * part) ^ swap)) * 16);
#pragma unroll
          for (int i = 0; i < 4; ++i) w[4 * part + i][c] = f[i];
        }
      }
    }
  }

  int output_, token_, depth_;
  float sum_[kMineTokens][kMine] = {};
};

}  // namespace
}  // namespace blocksparse::gemm::stream_w_f32
