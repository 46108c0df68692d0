// What a CUDA kernel sees of a layout in one direction. All of it lies on the device.
#pragma once

#include <cstdint>

#include "core/tables.h"
#include "gemm/product.h"

namespace blocksparse::gemm {

struct DeviceWalk {
  const int32_t* counts = nullptr;  // pieces, splits and slots in use
  const int32_t* starts = nullptr;
  const BlockRef* refs = nullptr;
  const Piece* pieces = nullptr;
  const Split* splits = nullptr;
  const int32_t* order = nullptr;  // order of strips, for blocks no larger than a strip
};

// Computes where the tables of `layout` are, without reading them.
DeviceWalk walk_on_device(const LayoutView& layout, bool by_in);
const int32_t* out_of_on_device(const LayoutView& layout);

}  // namespace blocksparse::gemm
