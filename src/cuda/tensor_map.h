// How the copying hardware of sm_90 sees a matrix: made on the host, given to a kernel by value.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "blocksparse/status.h"

namespace blocksparse::cuda {

struct BoxedMatrix {
  const void* data;  // 16-bit elements, at a multiple of 16 bytes
  int64_t columns, rows;
  int64_t row_stride;              // in elements, a multiple of 8
  uint32_t box_columns, box_rows;  // of a copy: 64 columns are swizzled in 128 bytes, 32 in 64, 16 in 32
  // More than 0: so many matrices, with `matrix_stride` elements from one to the next, and copies tell which.
  int64_t matrices = 0, matrix_stride = 0;
};

Status make_tensor_map(const BoxedMatrix& m, CUtensorMap& map);

// Channels-last images whose pixels are copied in the order of positions that a filter takes: a copy has `box_channels`
// of `box_positions` positions, which go on in the next row and the next image. Sizes are {width, height, depth}.
struct BoxedImages {
  const void* data;     // 16-bit elements, at a multiple of 16 bytes
  int64_t n, channels;  // channels are a multiple of 8
  int32_t dimensions;   // 2 or 3
  int64_t size[3];
  int32_t first[3];                      // pixel of the first position, at the filter's first tap
  int32_t stride[3];                     // pixels from position to position
  int64_t positions[3];                  // along each size
  uint32_t box_channels, box_positions;  // 64 channels are swizzled in 128 bytes, 32 in 64
};

// The hardware takes corners of [-128, 127] in two dimensions and of [-16, 15] in three, strides up to 8, and taps up
// to 255 and 31 pixels apart.
Status make_image_map(const BoxedImages& m, CUtensorMap& map);

// Whether this driver makes them.
Status prepare_tensor_maps();

}  // namespace blocksparse::cuda
