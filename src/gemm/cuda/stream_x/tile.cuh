// What a warp of the kernel `stream_x` does with a block of W: it reads fragments of W and x from shared memory.
//
// b = 16 and 32: W is mma.sync's left operand, 16 outputs, and 8 tokens are its columns. Rows of W are taken in an
// order in which a lane ends with neighbouring outputs. b = 8: 16 tokens are the rows, and two blocks of a row of W
// make one step of 16 inputs.
#pragma once

#include "core/ceil_div.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/movmatrix.h"
#include "cuda/ptx/shared.h"
#include "gemm/cuda/call.h"
#include "gemm/cuda/stream_x/plan.h"

namespace blocksparse::gemm::stream_x {
namespace {

// Kernels without a residual are compiled separately: the code for it cost calls without one 2 %.
template <class T, int B, bool ByIn, bool Residual, int Tokens>
struct Kernel {
  using Element = T;
  static constexpr bool by_in = ByIn, residual = Residual;
  static constexpr int block = B, kBlockBytes = B * B * 2;
  static constexpr int kTokens = Tokens;
  static constexpr int kStageBytes = Tokens * kInputs * 2, kStages = 5 * kMostTokens / Tokens;
  static constexpr int kSharedBytes = kStages * (kStageBytes + 16) + kWeightBytes;
  static constexpr int kWarps = warps_of(B), kRows = kOutputs / B / kWarps;  // kRows: rows of blocks of a warp
  static constexpr int kEights = B / 8;                                      // eighths of a block's outputs or inputs
  static constexpr int kTiles = Tokens / 8;                                  // tiles of tokens
  static constexpr int kSixteens = ceil_div(B, 16);                          // sixteens of a block's outputs
  static constexpr int kBlocks = kInputs / B;                                // blocks of a chunk, along the inputs
  static constexpr int kThreads = kWarps * 32 + 128;
  static constexpr int kRegisters = kWarps == 8 ? 240 : 112, kFeedRegisters = 24;
  // A row's ring of W holds portions: a block, or four blocks for b = 8.
  static constexpr int kPortionBytes = B == 8 ? 4 * kBlockBytes : kBlockBytes;
  static constexpr int kRingBytes = kWeightBytes / (kWarps * kRows), kRing = kRingBytes / kPortionBytes;
  // Whether W is read a step ahead and lists a tile ahead. For b = 8 the registers are needed for the x that is under
  // way: 118 us -> 132 (4096 x 4096, 4096 tokens, density .10, H200, 2026-11-24).
  static constexpr bool kAhead = B != 8;
  static_assert(kRing >= 4 && kRing <= 8 && 32 * kBlockBytes % kRingBytes == 0);
};

// The sums of a row of blocks. b = 8: [-][16 tokens][mma's], otherwise [16 outputs][8 tokens][mma's].
template <class K>
using Sums = std::conditional_t<K::block == 8, float[1][K::kTokens / 16][4], float[K::kSixteens][K::kTiles][4]>;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % 32; }

// The offset of the row of x that this lane gives to ldmatrix, for the first tokens and the first block of a box of 64
// inputs. b = 32: 8 tokens x 32 inputs, b = 16: 16 x 16, b = 8: 16 x 8 of two blocks.
template <class K>
__device__ inline uint32_t lane_of() {
  const int lane = lane_id();
  int row = lane % 16, vector = 0;
  if constexpr (K::block == 32) row = lane % 8, vector = lane / 8;
  if constexpr (K::block == 16) row = lane % 8 + lane / 16 * 8, vector = lane / 8 % 2;
  return static_cast<uint32_t>(row * 128 + (vector ^ row % 8) * 16);
}

// The address where a block's x begins for a lane.
template <class K>
__device__ inline uint32_t x_address(uint32_t stage, uint32_t lane, int from) {
  constexpr unsigned kOfBox = 64 / K::block;
  const unsigned in_chunk = static_cast<unsigned>(from) % K::kBlocks;
  return stage + in_chunk / kOfBox * (K::kTokens * 128) + (lane ^ in_chunk % kOfBox * (K::block * 2));
}

// The output of row g of eighth e, chosen so that a lane's two columns of all eighths are neighbours.
template <class K>
__device__ inline int output_of(int e, int g) {
  return g / 2 * (K::block / 4) + 2 * e + g % 2;
}

// ---- W --------------------------------------------------------------------------------------------------------------

// How a lane copies its part of each portion to shared memory. Eight lanes have a line of 128 bytes and two a sector of
// 32, in shared memory as well: otherwise L2 would be asked for a sector twice. Where W is read untransposed, sectors
// are permuted within the line and halves within the sector, so that the rows of a lane's ldmatrix meet all banks.
// Where W is read transposed, it is read by words, which movmatrix transposes.
template <class K>
struct Copy {
  uint32_t to;
  int32_t from;

  __device__ static Copy of_lane() {
    const int lane = lane_id(), line = lane / 8, sector = lane % 8 / 2 ^ line;
    const auto to = static_cast<uint32_t>(lane * 16);
    if constexpr (K::block == 8) return {to, lane % 8 * 16};
    else if constexpr (K::by_in) return {to, lane * 16};
    else if constexpr (K::block == 32) return {to, line * 512 + sector * 32 + (lane ^ sector / 2) % 2 * 16};
    else return {to, line * 128 + sector * 32 + (lane ^ sector) % 2 * 16};
  }
  // `block` is the address of this lane's block, plus `from`.
  __device__ void start(uint32_t portion, const char* block) const {
    constexpr int kTimes = K::block == 32 ? 4 : 1;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      ptx::cp_async_16_at(portion + to + static_cast<uint32_t>(i * 512), block + (K::by_in ? i * 512 : i * 128), 16);
    }
  }
  // The place of the row of W that this lane gives to ldmatrix for the first 16 outputs and inputs. The next 16 inputs
  // differ by 32 bytes of the address.
  __device__ static uint32_t row() {
    const int matrix = lane_id() / 8, line = lane_id() % 8 / 2, odd = lane_id() % 2;
    const int sector = K::block == 32 ? odd * 2 : matrix % 2 * 2 + odd, half = matrix / 2 ^ odd;
    return static_cast<uint32_t>((K::block == 32 ? matrix % 2 * 512 : 0) + line * 128 + (sector ^ line) * 32 +
                                 half * 16);
  }
};

// Fragments of W. b = 8: of two blocks, mma's right operands, [8 inputs][8 outputs] each. Otherwise of one block, left
// operands, [16 outputs][16 inputs] each. Except for b = 8, what is loaded is used in the next step.
template <class K>
struct WeightFragments {
  static constexpr int kSteps = K::kEights / 2;  // steps of 16 inputs
  uint32_t words[K::kEights == 1 ? 2 : K::kEights * K::kEights];

  __device__ void load_two(uint32_t first, uint32_t second) {
    const auto lane = static_cast<uint32_t>(lane_id());
    words[0] = __float_as_uint(ptx::ld_shared_4(first + lane * 4));
    words[1] = __float_as_uint(ptx::ld_shared_4(second + lane * 4));
  }
  __device__ void load(uint32_t portion) {
    const auto lane = static_cast<uint32_t>(lane_id());
    if constexpr (!K::by_in) {
      const uint32_t row = Copy<K>::row();
#pragma unroll
      for (int i = 0; i < K::kSixteens * kSteps; ++i) {
        const auto m = static_cast<uint32_t>(i / kSteps), s = static_cast<uint32_t>(i % kSteps);
        ptx::ldmatrix_x4_at(four(i), (portion + m * 1024 + row) ^ (s * 32));
      }
    } else if constexpr (K::block == 32) {
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) {
        const int4 v = ptx::ld_shared_16(portion + e * 512 + lane * 16);
        words[4 * e] = static_cast<uint32_t>(v.x), words[4 * e + 1] = static_cast<uint32_t>(v.y);
        words[4 * e + 2] = static_cast<uint32_t>(v.z), words[4 * e + 3] = static_cast<uint32_t>(v.w);
      }
    } else {
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const float2 v = ptx::ld_shared_8(portion + e * 256 + lane * 8);
        words[2 * e] = __float_as_uint(v.x), words[2 * e + 1] = __float_as_uint(v.y);
      }
    }
  }
  // Turns what was loaded into operands: [16 outputs][step][mma's words].
  __device__ WeightFragments operands() const {
    if constexpr (!K::by_in) return *this;
    WeightFragments w;
    if constexpr (K::block == 8) {
      w.words[0] = ptx::movmatrix_trans(words[0]), w.words[1] = ptx::movmatrix_trans(words[1]);
    } else {
#pragma unroll
      for (int k = 0; k < K::kEights * K::kEights; ++k) {
        const int m = k / 4 / kSteps, s = k / 4 % kSteps, i = k % 4;
        w.words[k] = ptx::movmatrix_trans(words[(2 * s + i / 2) * K::kEights + 2 * m + i % 2]);
      }
    }
    return w;
  }
  __device__ const uint32_t (&of(int m, int s) const)[4] {
    return reinterpret_cast<const uint32_t(&)[4]>(words[(m * kSteps + s) * 4]);
  }

 private:
  __device__ uint32_t (&four(int i))[4] { return reinterpret_cast<uint32_t(&)[4]>(words[4 * i]); }
};

// ---- Products -------------------------------------------------------------------------------------------------------

// mma's right operands for two times 8 tokens: [tokens][step of 16 inputs][words].
template <class K>
struct Tokens {
  uint32_t words[2][K::kEights / 2][2];

  __device__ void load(uint32_t from) {
    uint32_t all[4];
    ptx::ldmatrix_x4_at(all, from);
    set(0, 0, all[0], all[1]), set(K::block == 16 ? 1 : 0, K::kEights / 2 - 1, all[2], all[3]);
    if constexpr (K::block == 32) {
      ptx::ldmatrix_x4_at(all, from + 8 * 128);
      set(1, 0, all[0], all[1]), set(1, 1, all[2], all[3]);
    }
  }

 private:
  __device__ void set(int t, int step, uint32_t low, uint32_t high) {
    words[t][step][0] = low, words[t][step][1] = high;
  }
};

// sums += W x^T for a block of at least 16 x 16.
template <class K>
__device__ inline void multiply_block(Sums<K>& sums, uint32_t x, const WeightFragments<K>& w) {
  Tokens<K> tokens[2];
  tokens[0].load(x);
#pragma unroll
  for (int pair = 0; pair < K::kTiles / 2; ++pair) {
    if (pair + 1 < K::kTiles / 2) tokens[(pair + 1) % 2].load(x + (pair + 1) * 16 * 128);
#pragma unroll
    for (int s = 0; s < K::kEights / 2; ++s) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int m = 0; m < K::kSixteens; ++m) {
          ptx::mma_m16n8k16(sums[m][2 * pair + t], w.of(m, s), tokens[pair % 2].words[t][s], typename K::Element{});
        }
      }
    }
  }
}

// Calls body(i, words) for x of Count times 16 tokens (of two blocks of 8 x 8) or 32 tokens (of one), with the next
// loads under way.
template <int Count, class Body>
__device__ inline void each_of_x(uint32_t from, uint32_t step, Body body) {
  constexpr int kUnderWay = 3;
  uint32_t words[kUnderWay + 1][4];
#pragma unroll
  for (int i = 0; i < kUnderWay; ++i) ptx::ldmatrix_x4_at(words[i], from + i * step);
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (i + kUnderWay < Count)
      ptx::ldmatrix_x4_at(words[(i + kUnderWay) % (kUnderWay + 1)], from + (i + kUnderWay) * step);
    body(i, words[i % (kUnderWay + 1)]);
  }
}

// Multiplies two blocks of 8 x 8 of a row: 16 inputs.
template <class K>
__device__ inline void multiply_pair(Sums<K>& sums, uint32_t x, const WeightFragments<K>& w) {
  each_of_x<K::kTokens / 16>(x, 16 * 128, [&](int m, const uint32_t(&of_x)[4]) {
    ptx::mma_m16n8k16(sums[0][m], of_x, w.words, typename K::Element{});
  });
}

// Multiplies one block of 8 x 8. Lanes give rows 0 ... 31.
template <class K>
__device__ inline void multiply_single(Sums<K>& sums, uint32_t x, const WeightFragments<K>& w) {
  each_of_x<K::kTokens / 32>(x, 32 * 128, [&](int m, const uint32_t(&of_x)[4]) {
    ptx::mma_m16n8k8(sums[0][2 * m], of_x[0], of_x[1], w.words[0], typename K::Element{});
    ptx::mma_m16n8k8(sums[0][2 * m + 1], of_x[2], of_x[3], w.words[0], typename K::Element{});
  });
}

}  // namespace
}  // namespace blocksparse::gemm::stream_x
