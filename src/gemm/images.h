// Activations that are gathered from channels-last images, as a convolution does.
#pragma once

#include <cstdint>

namespace blocksparse::gemm {

// A product whose x is gathered from images. Token t is a position of a filter. Input i is a channel at one of its
// taps: i = tap * inputs_of_tap + channel. Taps and positions are numbered in the order of their places, the width
// fastest. Arrays of three are {width, height, depth}. Pixels outside an image are 0.
struct GatheredImages {
  const void* data = nullptr;
  int64_t n = 0, channels = 0, inputs_of_tap = 0;  // inputs_of_tap is a multiple of 64
  int64_t size[3] = {1, 1, 1}, positions[3] = {1, 1, 1}, taps[3] = {1, 1, 1};
  int32_t first[3] = {};            // pixel of the first position at the first tap; may be outside
  int32_t stride[3] = {1, 1, 1};    // pixels from one position to the next
  int32_t dilation[3] = {1, 1, 1};  // pixels from one tap to the next

  // Whether the third size matters. If not, every slice is slice 0; a single slice may still be read from outside
  // (first).
  bool deep() const { return size[2] != 1 || taps[2] != 1 || positions[2] != 1 || first[2] != 0; }
};

// Channels-last images of which a product writes some pixels only: token t is the t-th of those.
struct ScatteredImages {
  const void* data = nullptr;
  int64_t n = 0, channels = 0;
  int64_t size[3] = {1, 1, 1}, positions[3] = {1, 1, 1};
  int32_t first[3] = {}, stride[3] = {1, 1, 1};
};

}  // namespace blocksparse::gemm
