// Images laid end to end, with zeros between their rows and between images, so that a tap is some positions further on.
// Nothing is copied: the copying hardware of sm_90 reads images in this order.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/conv/cuda/gather/phases.h"

namespace blocksparse::conv {

// Position (image * height + row) * width + column is a pixel of y, if there is one. With a tap's shift it is the pixel
// of x that the tap reads. Zeros behind a row also stand in front of the next.
struct Raster {
  int32_t width = 0, height = 0;
  int64_t positions = 0;                  // of all images
  int32_t row_step = 0, column_step = 0;  // positions from one tap to the next
  int32_t reach = 0;                      // positions from the first tap to the last

  int32_t shift(int64_t tap_row, int64_t tap_column) const {
    return static_cast<int32_t>(tap_row * row_step + tap_column * column_step);
  }
};

// Empty if steps are not of one pixel, if images are deep, or if the hardware cannot walk them so.
std::optional<Raster> raster_of(const Phase& phase);

// x as images of the raster's positions.
gemm::GatheredImages in_raster(const gemm::GatheredImages& x, const Raster& raster);
// dy, which is not gathered, likewise.
gemm::GatheredImages in_raster(const Images& dy, const Phase& phase, const Raster& raster);

}  // namespace blocksparse::conv
