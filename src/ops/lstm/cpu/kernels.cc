#include "ops/lstm/cpu/kernels.h"

#include <span>

namespace blocksparse::lstm {

const CellKernel* find_cell_kernel(Isa isa, DType dtype) {
  static const CellKernel kKernels[] = {
#define BS_KERNEL(isa, dtype) cell_##isa##_##dtype(),
#include "cpu/kernels_of_ops.inc"
#undef BS_KERNEL
  };
  return find_kernel(std::span<const CellKernel>(kKernels), isa, dtype);
}

}  // namespace blocksparse::lstm
