#include "ops/norm/cpu/kernels.h"

#include <span>

namespace blocksparse::norm {

const RowKernel* find_row_kernel(Isa isa, DType dtype) {
  static const RowKernel kKernels[] = {
#define BS_KERNEL(isa, dtype) rows_##isa##_##dtype(),
#include "cpu/kernels_of_ops.inc"
#undef BS_KERNEL
  };
  return find_kernel(std::span<const RowKernel>(kKernels), isa, dtype);
}

}  // namespace blocksparse::norm
