#include "ops/norm/cpu/kernels.h"

#include <vector>

namespace blocksparse::norm {

const RowKernel* find_row_kernel(Isa isa, DType dtype) {
  static const std::vector<RowKernel> kernels = {
#define NORM_ROWS(isa, dtype) rows_##isa##_##dtype(),
#include "ops/norm/cpu/kernels.inc"
#undef NORM_ROWS
  };
  return find_kernel(std::span<const RowKernel>(kernels), isa, dtype);
}

}  // namespace blocksparse::norm
