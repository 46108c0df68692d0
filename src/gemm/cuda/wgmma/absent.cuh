// Repairs outputs that met Inf or NaN of x through a missing block. Where W is filled up (b <= 32) a patch holds zeros
// for missing blocks, and 0 * Inf is NaN, which outputs without such a block must not see. The product notes which sums
// are not finite. A kernel after it computes their NaN outputs once more, from the existing blocks, one by one. With
// finite x it reads a word for each 64 outputs of a tile of tokens and ends.
#pragma once

#include "cuda/launch.h"
#include "cuda/ptx/griddepcontrol.h"
#include "gemm/cuda/finish.cuh"
#include "gemm/cuda/wgmma/maps.cuh"
#include "gemm/cuda/wgmma/tables.h"

namespace blocksparse::gemm::wgmma {
namespace {

// Each warp of a warpgroup notes whether its sums of a tile are finite: a byte of the word of its strip and tile of
// tokens.
template <class Sums>
__device__ inline void note_not_finite(uint8_t* notes, int strips, int2 tile, const Sums& sums) {
  if (notes == nullptr || tile.x >= strips) return;
  const auto* sum = reinterpret_cast<const float*>(&sums);
  float zero = 0;  // NaN after a sum that is not finite
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Sums) / sizeof(float)); ++i) zero = fmaf(sum[i], 0.0f, zero);
  const bool found = __any_sync(~0u, isnan(zero));
  const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
  if (threadIdx.x % 32 == 0) notes[(int64_t{tile.y} * strips + tile.x) * 4 + warp] = found ? 1 : 0;
}

// x, one element at a time.
template <class T>
struct TokensOfX {
  DeviceMatrix x;
  __device__ float at(int64_t token, int64_t input) const { return widen(*x.at<T>(token, input)); }
};

// x gathered from images, one element at a time: a pixel at one of its taps. Pixels outside the image, and channels
// that fill up a tap, are 0.
template <class T>
struct PixelsOfX {
  GatheredImages x;

  __device__ float at(int64_t token, int64_t input) const {
    int64_t tap = input / x.inputs_of_tap, position = token, place = 0, steps[3];
    const int64_t channel = input % x.inputs_of_tap;
    if (channel >= x.channels) return 0;
    for (int axis = 0; axis < 3; ++axis) {  // width, height, depth
      steps[axis] =
          position % x.positions[axis] * x.stride[axis] + x.first[axis] + tap % x.taps[axis] * x.dilation[axis];
      if (steps[axis] < 0 || steps[axis] >= x.size[axis]) return 0;
      position /= x.positions[axis], tap /= x.taps[axis];
    }
    place = ((position * x.size[2] + steps[2]) * x.size[1] + steps[1]) * x.size[0] + steps[0];
    return widen(static_cast<const T*>(x.data)[place * x.channels + channel]);
  }
};

template <class X>
struct Repair {
  X x;
  DeviceWalk walk;
  const void* w;
  const float* gates;
  bool by_in;
  int32_t block, tile_tokens, strips, token_tiles, n;
  int64_t inputs, outputs;
  const uint32_t* notes;
  Finish finish;
  ScatteredImages scattered;  // without data: tokens of y are its rows

  // The address of an element of y.
  template <class T>
  __device__ T* y_at(int64_t token, int64_t output) const {
    if (scattered.data == nullptr) return finish.at<T>(token, output);
    int64_t at[3], position = token;
    for (int axis = 0; axis < 3; ++axis) {
      at[axis] = position % scattered.positions[axis] * scattered.stride[axis] + scattered.first[axis];
      position /= scattered.positions[axis];
    }
    const int64_t pixel =
        ((position * scattered.size[2] + at[2]) * scattered.size[1] + at[1]) * scattered.size[0] + at[0];
    return static_cast<T*>(const_cast<void*>(scattered.data)) + pixel * scattered.channels + output;
  }

  template <class T>
  __device__ float sum_of(int64_t token, int64_t output) const {
    const auto row = static_cast<int32_t>(output / block), inside = static_cast<int32_t>(output % block);
    float sum = 0;
    for (int32_t i = walk.starts[row]; i < walk.starts[row + 1]; ++i) {
      const BlockRef ref = walk.refs[i];
      const float gate = gates == nullptr ? 1 : gates[ref.weight];
      if (gate == 0) continue;
      const T* values = static_cast<const T*>(w) + int64_t{ref.weight} * block * block;
      const int64_t first = int64_t{ref.from} * block;
      for (int32_t k = 0; k < block && first + k < inputs; ++k) {
        sum += gate * widen(values[by_in ? k * block + inside : inside * block + k]) * x.at(token, first + k);
      }
    }
    return sum;
  }
};

template <class T, class X>
__global__ void __launch_bounds__(256) wgmma_repair(const __grid_constant__ Repair<X> r) {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int words = r.strips * r.token_tiles, elements = 64 * r.tile_tokens;
  __shared__ int found[256], count;
  for (int first = static_cast<int>(blockIdx.x) * 256; first < words; first += static_cast<int>(gridDim.x) * 256) {
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    const int mine = first + static_cast<int>(threadIdx.x);
    if (mine < words && r.notes[mine] != 0) found[atomicAdd(&count, 1)] = mine;  // in any order
    __syncthreads();
    for (int i = 0; i < count; ++i) {
      const int strip = found[i] % r.strips, tile = found[i] / r.strips;
      for (int e = static_cast<int>(threadIdx.x); e < elements; e += 256) {
        const int64_t output = int64_t{strip} * 64 + e % 64, token = int64_t{tile} * r.tile_tokens + e / 64;
        if (token >= r.n || output >= r.outputs) continue;
        T* y = r.template y_at<T>(token, output);
        if (isnan(widen(*y))) *y = r.finish.template value<T>(token, output, r.template sum_of<T>(token, output));
      }
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace blocksparse::gemm::wgmma
