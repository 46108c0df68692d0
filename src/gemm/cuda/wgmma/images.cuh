// How the kernel `wgmma` reads gathered images and writes scattered ones: the copying hardware (TMA) finds the pixels.
#pragma once

#include <algorithm>

#include "cuda/divider.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/tensor_map.h"
#include "gemm/images.h"

namespace blocksparse::gemm::wgmma {

template <class Images>
cuda::BoxedImages boxed(const Images& images, bool deep, uint32_t channels, uint32_t positions) {
  cuda::BoxedImages m{.data = images.data,
                      .n = images.n,
                      .channels = images.channels,
                      .dimensions = deep ? 3 : 2,
                      .size = {},
                      .first = {},
                      .stride = {},
                      .positions = {},
                      .box_channels = channels,
                      .box_positions = positions};
  std::copy(images.size, images.size + 3, m.size);
  std::copy(images.first, images.first + 3, m.first);
  std::copy(images.stride, images.stride + 3, m.stride);
  std::copy(images.positions, images.positions + 3, m.positions);
  return m;
}

struct ImageTap {
  int channel;
  uint16_t column, row, slice;
};
struct ImagePixel {
  int column, row, slice, image;
};

// Turns a token into the place of its pixel.
struct ImageSteps {
  cuda::Divider of_image, of_slice, of_row;  // of positions
  int32_t first[3] = {}, stride[3] = {};
  bool deep = false;  // images have slices

  ImageSteps() = default;
  template <class Images>
  ImageSteps(const Images& x, bool deep)
      : of_image(x.positions[0] * x.positions[1] * x.positions[2]),
        of_slice(x.positions[0] * x.positions[1]),
        of_row(x.positions[0]),
        deep(deep) {
    std::copy(x.first, x.first + 3, first);
    std::copy(x.stride, x.stride + 3, stride);
  }

  __device__ ImagePixel pixel_of(int position) const {
    const int image = of_image.divide(position), slice = of_slice.divide(position), row = of_row.divide(position);
    return {position * stride[0] + first[0], row * stride[1] + first[1], slice * stride[2] + first[2], image};
  }
};

// Turns an input into a channel at a tap.
struct TapSteps {
  cuda::Divider inputs, taps_of_slice, taps_of_row;
  int32_t dilation[3] = {};

  TapSteps() = default;
  explicit TapSteps(const GatheredImages& x)
      : inputs(x.inputs_of_tap), taps_of_slice(x.taps[0] * x.taps[1]), taps_of_row(x.taps[0]) {
    std::copy(x.dilation, x.dilation + 3, dilation);
  }

  __device__ ImageTap tap_of(int input) const {
    int tap = inputs.divide(input);
    const int slice = taps_of_slice.divide(tap), row = taps_of_row.divide(tap);
    return {input, static_cast<uint16_t>(tap * dilation[0]), static_cast<uint16_t>(row * dilation[1]),
            static_cast<uint16_t>(slice * dilation[2])};
  }
};

__device__ inline void load_positions(uint32_t to, const CUtensorMap* map, uint32_t full, bool deep,
                                      const ImageTap& tap, const ImagePixel& pixel) {
  if (deep) {
    ptx::load_image_box(to, map, full, tap.channel, pixel.column, pixel.row, pixel.slice, pixel.image, tap.column,
                        tap.row, tap.slice);
  } else {
    ptx::load_image_box(to, map, full, tap.channel, pixel.column, pixel.row, pixel.image, tap.column, tap.row);
  }
}

__device__ inline void store_positions(const CUtensorMap* map, uint32_t from, bool deep, int channel,
                                       const ImagePixel& pixel) {
  if (deep) ptx::store_image_box(map, from, channel, pixel.column, pixel.row, pixel.slice, pixel.image);
  else ptx::store_image_box(map, from, channel, pixel.column, pixel.row, pixel.image);
}

}  // namespace blocksparse::gemm::wgmma
