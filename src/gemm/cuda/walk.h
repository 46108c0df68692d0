// What a CUDA kernel sees of a layout in one direction; all of it lies on the device.
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
  const int32_t* order = nullptr;  // of strips, if their blocks are not larger
};

// Where the tables of `layout` lie; they are not looked at.
DeviceWalk walk_on_device(const LayoutView& layout, bool by_in);
const int32_t* out_of_on_device(const LayoutView& layout);

}  // namespace blocksparse::gemm
