// The convolution on any CUDA card, for any problem.
//   fprop, dgrad   the depth is a row of W's blocks, each at all taps, laid end to end. A tile is 64 pixels x (up to
//   64)
//                  outputs
//   wgrad          the depth is the pixels. A tile is 64 inputs x (up to 64) outputs of the filter at one tap
// Who does what
//   load      all threads copy tiles of 128 bytes of depth, two ahead: channels-last images by vectors in the
//             background, anything else element by element. What is outside of an image becomes 0
//   compute   4 warps of 16 rows: mma.sync for bf16 and f16, fused multiply-add for f32 and f64
//   finish    sums go through shared memory
#pragma once

#include "cuda/divider.h"
#include "cuda/launch.h"
#include "gemm/cuda/generic/tile.cuh"
#include "ops/conv/cuda/driver.h"

namespace blocksparse::conv {
namespace {

using cuda::kDepth;
using cuda::kThreads;
using cuda::kTileRows;
using cuda::kVector;
using cuda::Place;
using gemm::generic::inside_tile;
using gemm::generic::Kernel;
using gemm::generic::shift_of;
using gemm::generic::Stage;
using gemm::generic::warp_has_rows;
using gemm::generic::with_outputs;

struct DevicePixel {
  int at[3];  // depth, height, width
};

struct DeviceImages {
  const void* data;
  int64_t n, image_stride, pixel_stride, channel_stride;
  int32_t channels;
  int32_t size[3];
  const int32_t* order;                      // channel c is order[c], which nobody has checked; null: c itself
  bool in_vectors;                           // of 16 bytes of channels
  cuda::Divider of_image, of_slice, of_row;  // pixels

  __device__ int64_t pixels() const { return of_image.by; }
  __device__ int32_t channel(int32_t c) const { return order == nullptr ? c : order[c]; }
  __device__ bool has(int32_t channel) const { return channel >= 0 && channel < channels; }
  // The place of pixel `position`, counted over all images.
  __device__ DevicePixel pixel(int64_t position, int64_t& image) const {
    image = position / pixels();
    auto rest = static_cast<int>(position - image * pixels());
    const int slice = of_slice.divide(rest), row = of_row.divide(rest);
    return {slice, row, rest};
  }
  __device__ int64_t offset(int64_t image, const DevicePixel& p) const {
    return image * image_stride + ((int64_t{p.at[0]} * size[1] + p.at[1]) * size[2] + p.at[2]) * pixel_stride;
  }
};

template <class T>
DeviceImages images_of(const Images& a, const int32_t* order) {
  DeviceImages d{.data = a.data,
                 .n = a.n,
                 .image_stride = a.image_stride(),
                 .pixel_stride = a.pixel_stride(),
                 .channel_stride = a.channel_stride(),
                 .channels = static_cast<int32_t>(a.channels),
                 .size = {},
                 .order = order,
                 .in_vectors = a.channels_last && order == nullptr && a.channels % kVector<T> == 0 &&
                               reinterpret_cast<uintptr_t>(a.data) % cuda::kVectorBytes == 0,
                 .of_image = cuda::Divider(std::max<int64_t>(1, a.pixels())),
                 .of_slice = cuda::Divider(std::max<int64_t>(1, a.size[1] * a.size[2])),
                 .of_row = cuda::Divider(std::max<int64_t>(1, a.size[2]))};
  for (size_t axis = 0; axis < 3; ++axis) d.size[axis] = static_cast<int32_t>(a.size[axis]);
  return d;
}

struct DeviceTap {
  int at[3];
};

struct DeviceGather {
  bool inverse;
  int32_t stride[3], dilation[3], padding[3];
  cuda::Divider of_slice, of_row;  // taps

  __device__ DeviceTap tap(int index) const {
    const int slice = of_slice.divide(index), row = of_row.divide(index);
    return {slice, row, index};
  }
  // Like Gather::source: false if the pixel is outside of images of that size.
  __device__ bool source(const DevicePixel& p, const DeviceTap& tap, const int32_t (&size)[3], DevicePixel& to) const {
    bool there = true;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const int reach = tap.at[a] * dilation[a] - padding[a];
      int at = inverse ? p.at[a] - reach : p.at[a] * stride[a] + reach;
      if (inverse && stride[a] != 1) {
        there = there && at % stride[a] == 0;
        at /= stride[a];
      }
      there = there && at >= 0 && at < size[a];
      to.at[a] = at;
    }
    return there;
  }
};

inline DeviceGather device_gather(const Gather& g) {
  DeviceGather d{.inverse = g.inverse,
                 .stride = {},
                 .dilation = {},
                 .padding = {},
                 .of_slice = cuda::Divider(g.kernel[1] * g.kernel[2]),
                 .of_row = cuda::Divider(g.kernel[2])};
  for (size_t a = 0; a < 3; ++a) {
    d.stride[a] = static_cast<int32_t>(g.stride[a]);
    d.dilation[a] = static_cast<int32_t>(g.dilation[a]);
    d.padding[a] = static_cast<int32_t>(g.padding[a]);
  }
  return d;
}

}  // namespace
}  // namespace blocksparse::conv
