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
  uint32_t box_columns, box_rows;  // of a copy: 64 columns are swizzled in 128 bytes, 32 in 64
};

Status make_tensor_map(const BoxedMatrix& m, CUtensorMap& map);

// Whether this driver makes them.
Status prepare_tensor_maps();

}  // namespace blocksparse::cuda
