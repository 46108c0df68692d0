// x that the kernel `many` gathers from channels-last images, as a convolution does: token t is a position of a filter,
// input i a channel at one of its taps. The copying hardware finds the pixels; what lies beyond an image is 0.
#pragma once

#include "cuda/divider.h"
#include "cuda/ptx/bulk_copy.h"
#include "cuda/tensor_map.h"

namespace blocksparse::linear {

// Sizes are {width, height, depth}, 1 where there is none. Input = tap * inputs_of_tap + channel, taps in the order of
// their places, the width fastest; inputs_of_tap is a multiple of 64.
struct GatheredImages {
  const void* data;
  int64_t n, channels, inputs_of_tap;
  int64_t size[3], positions[3], taps[3];
  int32_t first[3];                // pixel of the first position at the first tap, which may be outside
  int32_t stride[3], dilation[3];  // pixels from position to position, from tap to tap
};

inline cuda::BoxedImages boxed(const GatheredImages& x, uint32_t channels, uint32_t positions) {
  cuda::BoxedImages m{.data = x.data,
                      .n = x.n,
                      .channels = x.channels,
                      .dimensions = x.size[2] == 1 && x.taps[2] == 1 && x.positions[2] == 1 ? 2 : 3,
                      .size = {},
                      .first = {},
                      .stride = {},
                      .positions = {},
                      .box_channels = channels,
                      .box_positions = positions};
  for (int axis = 0; axis < 3; ++axis) {
    m.size[axis] = x.size[axis];
    m.first[axis] = x.first[axis];
    m.stride[axis] = x.stride[axis];
    m.positions[axis] = x.positions[axis];
  }
  return m;
}

struct ImageTap {
  int channel;
  uint16_t column, row, slice;
};
struct ImagePixel {
  int column, row, slice, image;
};

// How a token and an input become coordinates.
struct ImageSteps {
  cuda::Divider of_image, of_slice, of_row;  // positions
  cuda::Divider inputs, taps_of_slice, taps_of_row;
  int32_t first[3] = {}, stride[3] = {}, dilation[3] = {};
  bool deep = false;  // images have slices

  ImageSteps() = default;
  explicit ImageSteps(const GatheredImages& x)
      : of_image(x.positions[0] * x.positions[1] * x.positions[2]),
        of_slice(x.positions[0] * x.positions[1]),
        of_row(x.positions[0]),
        inputs(x.inputs_of_tap),
        taps_of_slice(x.taps[0] * x.taps[1]),
        taps_of_row(x.taps[0]),
        deep(boxed(x, 0, 0).dimensions == 3) {
    for (int axis = 0; axis < 3; ++axis) {
      first[axis] = x.first[axis];
      stride[axis] = x.stride[axis];
      dilation[axis] = x.dilation[axis];
    }
  }

  __device__ ImageTap tap_of(int input) const {
    int tap = inputs.divide(input);
    const int slice = taps_of_slice.divide(tap), row = taps_of_row.divide(tap);
    return {input, static_cast<uint16_t>(tap * dilation[0]), static_cast<uint16_t>(row * dilation[1]),
            static_cast<uint16_t>(slice * dilation[2])};
  }
  __device__ ImagePixel pixel_of(int position) const {
    const int image = of_image.divide(position), slice = of_slice.divide(position), row = of_row.divide(position);
    return {position * stride[0] + first[0], row * stride[1] + first[1], slice * stride[2] + first[2], image};
  }
};

__device__ inline void load_positions(uint32_t to, const CUtensorMap* map, uint32_t full, const ImageSteps& steps,
                                      const ImageTap& tap, const ImagePixel& pixel) {
  if (steps.deep) {
    ptx::load_image_box(to, map, full, tap.channel, pixel.column, pixel.row, pixel.slice, pixel.image, tap.column,
                        tap.row, tap.slice);
  } else {
    ptx::load_image_box(to, map, full, tap.channel, pixel.column, pixel.row, pixel.image, tap.column, tap.row);
  }
}

}  // namespace blocksparse::linear
