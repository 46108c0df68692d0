// Descriptions of matrices and images for the copying hardware of sm_90 (TMA). The host makes them, a kernel takes them
// by value.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "blocksparse/status.h"

namespace blocksparse::cuda {

struct BoxedMatrix {
  const void* data;  // 16-bit elements, at a multiple of 16 bytes
  int64_t columns, rows;
  int64_t row_stride;              // in elements, a multiple of 8
  uint32_t box_columns, box_rows;  // box of a copy: 64 columns are swizzled in 128 bytes, 32 in 64, 16 in 32
  // More than 0: the number of matrices, `matrix_stride` elements apart. A copy names the matrix that it reads.
  int64_t matrices = 0, matrix_stride = 0;
};

Status make_tensor_map(const BoxedMatrix& m, CUtensorMap& map);

// Channels-last images whose pixels are copied in the order of a filter's positions. A copy holds `box_channels` of
// `box_positions` positions, which continue in the next row and the next image. Sizes are {width, height, depth}.
struct BoxedImages {
  const void* data;     // 16-bit elements, at a multiple of 16 bytes
  int64_t n, channels;  // channels are a multiple of 8
  int32_t dimensions;   // 2 or 3
  int64_t size[3];
  int32_t first[3];                      // pixel of the first position, at the filter's first tap
  int32_t stride[3];                     // pixels from one position to the next
  int64_t positions[3];                  // number of positions along each size
  uint32_t box_channels, box_positions;  // 64 channels are swizzled in 128 bytes, 32 in 64
};

// The hardware accepts corners of [-128, 127] in two dimensions and [-16, 15] in three, strides up to 8, and taps up to
// 255 and 31 pixels apart.
Status make_image_map(const BoxedImages& m, CUtensorMap& map);

// Whether this driver can make tensor maps.
Status prepare_tensor_maps();

}  // namespace blocksparse::cuda
