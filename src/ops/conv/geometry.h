// The geometry of a call at the edge: its checks, and the sizes that it gives.
#pragma once

#include "core/checks.h"
#include "ops/conv/conv.h"

namespace blocksparse::conv {

// Such as "[3, 3]".
std::string sizes_text(const SpatialSizes& sizes, int32_t rank);

// Checks that the rank and the numbers make sense.
Status check_geometry(const char* op, const ConvGeometry& geometry);
// The sizes of y for those of x. The geometry has been checked.
Result<SpatialSizes> output_size(const char* op, const ConvGeometry& geometry, const SpatialSizes& size);

// The orders that a tensor has: both, if an image has one pixel or one channel.
struct Orders {
  bool channels_last = true, channels_first = true;
};

// Checks for a dense [n, channels, size...] in an order that `orders` allows, and narrows `orders` to it.
Result<Images> check_images(const Named& t, int64_t channels, int32_t rank, Orders& orders);

// The geometry with three sizes; the unused axes come first.
Gather gather_of(const ConvGeometry& geometry, bool inverse);

}  // namespace blocksparse::conv
