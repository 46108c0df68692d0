// Activations that are gathered from channels-last images, as a convolution does.
#pragma once

#include <cstdint>

namespace blocksparse::gemm {

// Token t is a position of a filter, input i a channel at one of its taps: i = tap * inputs_of_tap + channel, taps and
// positions in the order of their places, the width fastest. Three numbers are of {width, height, depth}. What lies
// beyond an image is 0.
struct GatheredImages {
  const void* data = nullptr;
  int64_t n = 0, channels = 0, inputs_of_tap = 0;  // the last a multiple of 64
  int64_t size[3] = {1, 1, 1}, positions[3] = {1, 1, 1}, taps[3] = {1, 1, 1};
  int32_t first[3] = {};            // pixel of the first position at the first tap, which may be outside
  int32_t stride[3] = {1, 1, 1};    // pixels from position to position
  int32_t dilation[3] = {1, 1, 1};  // and from tap to tap

  // Not so, all slices are the first: a single one may still be read from beyond it.
  bool deep() const { return size[2] != 1 || taps[2] != 1 || positions[2] != 1 || first[2] != 0; }
};

// Channels-last images of which a product writes only some pixels: token t is the t-th of those.
struct ScatteredImages {
  const void* data = nullptr;
  int64_t n = 0, channels = 0;
  int64_t size[3] = {1, 1, 1}, positions[3] = {1, 1, 1};
  int32_t first[3] = {}, stride[3] = {1, 1, 1};
};

}  // namespace blocksparse::gemm
