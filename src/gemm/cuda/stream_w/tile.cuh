// What a warp of the kernel `stream_w` loads for one patch, and how it multiplies. A patch is a block, or a piece of 32
// x 32 of a larger one. Fragments are loaded from memory in mma's form. That works because inputs may be permuted
// within a patch if W and x are permuted alike, and outputs until they are stored. So a lane's loads are 16 bytes wide.
// If W is read transposed (by_in) the loads are no narrower, and movmatrix transposes the fragments. W is mma's left
// operand and tokens are its columns; for b = 8 it is the other way round.
#pragma once

#include "cuda/ptx/load.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/movmatrix.h"
#include "gemm/cuda/finish.cuh"
#include "gemm/cuda/stream_w/plan.h"

namespace blocksparse::gemm::stream_w {
namespace {

struct Args {
  DeviceWalk walk;
  const void *x, *w;
  const float* gates;
  // x: bytes from token to token and from patch to patch, for b >= 32 and f32. Smaller blocks of 16 bits are packed:
  // see pack.h.
  uint32_t x_token_bytes, x_patch_vectors;
  int32_t n;
  int32_t slices;          // slices of tokens, neighbours in the grid
  uint32_t slice_vectors;  // from slice to slice of packed x, in 16 bytes; 0: x is read in place
  int32_t warps;
  int32_t last_block, ragged;  // the last block of inputs, and how many inputs it has; 0: it is whole
  bool early;    // the kernel before writes x (or packs it) alone: everything else may be read before it is complete
  bool y_pairs;  // outputs are stored two at a time
  bool plain;    // sums are stored as they are: no bias, residual or activation
  int64_t outputs;
  Finish finish;
  float* partial;  // [slots][n][block]; null: no row is split
};

// The tokens of this thread block. Slices of the same outputs are neighbours in the grid, so they read W from L2
// together.
template <int N>
struct Slice {
  int32_t first = 0;          // the first token
  uint64_t packed_bytes = 0;  // bytes of packed x before it

  __device__ explicit Slice(const Args& p) {
    if (p.slices == 1) return;
    const uint32_t slice = blockIdx.x % static_cast<uint32_t>(p.slices);
    first = static_cast<int32_t>(slice) * N;
    packed_bytes = uint64_t{slice} * p.slice_vectors * 16;
  }
  // Tokens as rows of x. Packed x holds the tokens of the slice, and all of them exist.
  __device__ int first_in_x(const Args& p) const { return p.slice_vectors == 0 ? first : 0; }
  __device__ static int last_in_x(const Args& p) { return p.slice_vectors == 0 ? p.n - 1 : N - 1; }
};

__device__ inline int lane_row() { return static_cast<int>(threadIdx.x) % 32 / 4; }
__device__ inline int lane_column() { return static_cast<int>(threadIdx.x) % 4; }

// Sets inputs after the first `left` to 0. A word holds two neighbouring inputs (Beside), or one input of two outputs.
// input(word) is the first input of a word.
template <bool Beside, int Words, class Input>
__device__ inline void clear_beyond(uint32_t (&f)[Words], int left, Input input) {
#pragma unroll
  for (int i = 0; i < Words; ++i) {
    if (input(i) >= left) f[i] = 0;
    else if (Beside && input(i) + 1 >= left) f[i] &= 0xffff;
  }
}

// sum += gate * a b^T. Products are summed before they are gated: a gated element would have to be rounded.
template <class T, bool Gated>
__device__ inline void add_product(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], float gate) {
  if constexpr (Gated) {
    float products[4] = {};
    ptx::mma_m16n8k16(products, a, b, T{});
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += gate * products[i];
  } else {
    ptx::mma_m16n8k16(sum, a, b, T{});
  }
}

// b >= 32. Of each row (of W: g, g + 8, ...; of x: token g, g + 8, ...) a lane has 8 neighbouring inputs: 4 words.
template <class T, int B, int N, bool ByIn>
struct Tile {
  static constexpr int kOutputs = 32, kDepth = 32;                    // of a patch
  static constexpr int kStrips = B / 32, kPatches = B / 32;           // of a block
  static constexpr int kWordsW = 16, kWordsX = N / 2, kSums = N / 4;  // of a lane; sums in fours
  static constexpr int kPad = ByIn ? 1 : 4;                           // avoids bank conflicts when sums are staged
  static constexpr bool kReadyOffsets = false;  // computed when used: ready offsets would take two more registers
  const char *w, *x;                            // addresses of this lane
  uint32_t row[N / 8];

  __device__ explicit Tile(const Args& p) {
    const int g = lane_row(), t = lane_column();
    w = static_cast<const char*>(p.w) + ((ByIn ? 8 * (g / 2) + g % 2 : g) * B + 8 * t) * 2;
    const Slice<N> slice(p);
    x = static_cast<const char*>(p.x) + slice.packed_bytes + 16 * t;
    const int first = slice.first_in_x(p), last = slice.last_in_x(p);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) row[j] = static_cast<uint32_t>(min(first + 8 * j + g, last)) * p.x_token_bytes;
  }

  // Offsets of W in units of 64 bytes, of x in units of 16.
  __device__ static uint32_t w_offset(int weight, int strip, int patch) {
    return static_cast<uint32_t>(weight) * (B * B / 32) +
           static_cast<uint32_t>(ByIn ? patch * B + strip : strip * B + patch);
  }
  __device__ static uint32_t x_offset(const Args& p, int from, int patch) {
    return static_cast<uint32_t>(from * kPatches + patch) * p.x_patch_vectors;
  }

  __device__ void load_w(uint32_t (&f)[kWordsW], uint32_t offset) const {
    const char* from = w + static_cast<uint64_t>(offset) * 64;
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::ld_stream_16(f + 4 * i, from + i * (ByIn ? 4 : 16) * B);
  }
  __device__ void load_x(uint32_t (&f)[kWordsX], uint32_t offset) const {
    const char* from = x + static_cast<uint64_t>(offset) * 16;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) ptx::ld_16(f + 4 * j, from + row[j]);
  }
  __device__ static void clear_w_beyond(uint32_t (&f)[kWordsW], int left) {
    const int g = lane_row(), t = lane_column();
    clear_beyond<!ByIn>(f, left, [&](int i) { return ByIn ? 8 * (g / 2) + g % 2 + i / 4 * 2 : 8 * t + i % 4 * 2; });
  }

  template <bool Gated>
  __device__ static void multiply(const uint32_t (&w)[kWordsW], const uint32_t (&x)[kWordsX], float (&sum)[kSums][4],
                                  float gate) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {  // 16 outputs
#pragma unroll
      for (int s = 0; s < 2; ++s) {  // 16 inputs
        uint32_t a[4];
        if constexpr (ByIn) {
          a[0] = ptx::movmatrix_trans(w[8 * s + 2 * m]), a[1] = ptx::movmatrix_trans(w[8 * s + 2 * m + 1]);
          a[2] = ptx::movmatrix_trans(w[8 * s + 4 + 2 * m]), a[3] = ptx::movmatrix_trans(w[8 * s + 4 + 2 * m + 1]);
        } else {
          a[0] = w[8 * m + 2 * s], a[1] = w[8 * m + 4 + 2 * s];
          a[2] = w[8 * m + 2 * s + 1], a[3] = w[8 * m + 4 + 2 * s + 1];
        }
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
          const uint32_t b[2] = {x[4 * j + 2 * s], x[4 * j + 2 * s + 1]};
          add_product<T, Gated>(sum[m * (N / 8) + j], a, b, gate);
        }
      }
    }
  }
  // Stages the sums of tokens 8 j ... 8 j + 7 as [8, kOutputs + kPad].
  __device__ static void stage(const float (&sum)[kSums][4], int j, float* to) {
    const int g = lane_row(), t = lane_column();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int output = ByIn ? 8 * (g / 2) + g % 2 + 2 * (2 * m + c / 2) : 16 * m + 8 * (c / 2) + g;
        to[(2 * t + c % 2) * (kOutputs + kPad) + output] = sum[m * (N / 8) + j][c];
      }
    }
  }
};

// b = 16: a lane has 4 neighbouring inputs, 2 words.
template <class T, int N, bool ByIn>
  requires(sizeof(T) == 2)
struct Tile<T, 16, N, ByIn> {
  static constexpr int kOutputs = 16, kDepth = 16, kStrips = 1, kPatches = 1;
  static constexpr int kWordsW = 4, kWordsX = N / 4, kSums = N / 8;
  static constexpr int kPad = 4;
  static constexpr bool kReadyOffsets = true;
  static_assert(N >= 16);
  const char *w, *x;

  __device__ explicit Tile(const Args& p) {
    const int g = lane_row(), t = lane_column();
    w = static_cast<const char*>(p.w) + ((ByIn ? 4 * (g / 2) + g % 2 : g) * 16 + 4 * t) * 2;
    x = static_cast<const char*>(p.x) + Slice<N>(p).packed_bytes + (4 * g + t) * 16;
  }
  __device__ static uint32_t w_offset(int weight, int, int) { return static_cast<uint32_t>(weight) * 8; }
  __device__ static uint32_t x_offset(const Args&, int from, int) { return static_cast<uint32_t>(from) * 2 * N; }

  __device__ void load_w(uint32_t (&f)[kWordsW], uint32_t offset) const {
    const char* from = w + static_cast<uint64_t>(offset) * 64;
    ptx::ld_stream_8(f, from), ptx::ld_stream_8(f + 2, from + (ByIn ? 64 : 256));
  }
  __device__ void load_x(uint32_t (&f)[kWordsX], uint32_t offset) const {
    const char* from = x + static_cast<uint64_t>(offset) * 16;
#pragma unroll
    for (int j = 0; j < N / 16; ++j) ptx::ld_16(f + 4 * j, from + j * 512);
  }
  __device__ static void clear_w_beyond(uint32_t (&f)[kWordsW], int left) {
    const int g = lane_row(), t = lane_column();
    clear_beyond<!ByIn>(f, left, [&](int i) { return ByIn ? 4 * (g / 2) + g % 2 + i / 2 * 2 : 4 * t + i % 2 * 2; });
  }

  template <bool Gated>
  __device__ static void multiply(const uint32_t (&w)[kWordsW], const uint32_t (&x)[kWordsX], float (&sum)[kSums][4],
                                  float gate) {
    uint32_t a[4] = {w[0], w[2], w[1], w[3]};
    if constexpr (ByIn) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = ptx::movmatrix_trans(w[i]);
    }
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      const uint32_t b[2] = {x[2 * j], x[2 * j + 1]};
      add_product<T, Gated>(sum[j], a, b, gate);
    }
  }
  __device__ static void stage(const float (&sum)[kSums][4], int j, float* to) {
    const int g = lane_row(), t = lane_column();
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int output = ByIn ? 4 * (g / 2) + g % 2 + 2 * (c / 2) : 8 * (c / 2) + g;
      to[(2 * t + c % 2) * (kOutputs + kPad) + output] = sum[j][c];
    }
  }
};

// b = 8: a lane has 2 inputs, 1 word; tokens are mma's rows.
template <class T, int N, bool ByIn>
  requires(sizeof(T) == 2)
struct Tile<T, 8, N, ByIn> {
  static constexpr int kOutputs = 8, kDepth = 8, kStrips = 1, kPatches = 1;
  static constexpr int kWordsW = 1, kWordsX = N / 8, kSums = N / 16;
  static constexpr int kPad = 0;
  static constexpr bool kReadyOffsets = true;  // computed by the lanes for 32 patches at a time: 1.1x to 1.2x faster
  static_assert(N >= 16);
  const char *w, *x;

  __device__ explicit Tile(const Args& p) {
    const int lane = 4 * lane_row() + lane_column();
    w = static_cast<const char*>(p.w) + lane * 4;
    x = static_cast<const char*>(p.x) + Slice<N>(p).packed_bytes + lane * (N >= 32 ? 16 : 8);
  }
  __device__ static uint32_t w_offset(int weight, int, int) { return static_cast<uint32_t>(weight) * 2; }
  __device__ static uint32_t x_offset(const Args&, int from, int) { return static_cast<uint32_t>(from) * N; }

  __device__ void load_w(uint32_t (&f)[kWordsW], uint32_t offset) const {
    ptx::ld_stream_4(f, w + static_cast<uint64_t>(offset) * 64);
  }
  __device__ void load_x(uint32_t (&f)[kWordsX], uint32_t offset) const {
    const char* from = x + static_cast<uint64_t>(offset) * 16;
    if constexpr (N == 16) {
      ptx::ld_8(f, from);
    } else {
#pragma unroll
      for (int j = 0; j < N / 32; ++j) ptx::ld_16(f + 4 * j, from + j * 512);
    }
  }
  __device__ static void clear_w_beyond(uint32_t (&f)[kWordsW], int left) {
    clear_beyond<!ByIn>(f, left, [&](int) { return ByIn ? lane_row() : 2 * lane_column(); });
  }

  template <bool Gated>
  __device__ static void multiply(const uint32_t (&w)[kWordsW], const uint32_t (&x)[kWordsX], float (&sum)[kSums][4],
                                  float gate) {
    const uint32_t b = ByIn ? ptx::movmatrix_trans(w[0]) : w[0];
#pragma unroll
    for (int m = 0; m < kSums; ++m) {
      if constexpr (Gated) {
        float products[4] = {};
        ptx::mma_m16n8k8(products, x[2 * m], x[2 * m + 1], b, T{});
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][i] += gate * products[i];
      } else {
        ptx::mma_m16n8k8(sum[m], x[2 * m], x[2 * m + 1], b, T{});
      }
    }
  }
  __device__ static void stage(const float (&sum)[kSums][4], int j, float* to) {
#pragma unroll
    for (int c = 0; c < 2; ++c) to[lane_row() * kOutputs + 2 * lane_column() + c] = sum[j / 2][j % 2 * 2 + c];
  }
};

}  // namespace
}  // namespace blocksparse::gemm::stream_w
