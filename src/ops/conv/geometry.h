// The geometry of a call at the edge: whether it makes sense, and what sizes it gives.
#pragma once

#include "core/checks.h"
#include "ops/conv/conv.h"

namespace blocksparse::conv {

// "[3, 3]"
std::string sizes_text(const SpatialSizes& sizes, int32_t rank);

// Rank and numbers that make sense by themselves.
Status check_geometry(const char* op, const ConvGeometry& geometry);
// The sizes of y for those of x; the geometry was checked.
Result<SpatialSizes> output_size(const char* op, const ConvGeometry& geometry, const SpatialSizes& size);

// The orders that a tensor may be said to have: both, where an image has one pixel or one channel.
struct Orders {
  bool channels_last = true, channels_first = true;
};

// [n, channels, size...] dense in an order that `orders` allows, which is narrowed.
Result<Images> check_images(const Named& t, int64_t channels, int32_t rank, Orders& orders);

// The geometry of three sizes: unused axes first.
Gather gather_of(const ConvGeometry& geometry, bool inverse);

}  // namespace blocksparse::conv
