#include "cpu/simd_neon.h"
#include "ops/lstm/cpu/cell.h"

namespace blocksparse::lstm {

#define BS_KERNEL_neon(dtype) \
  CellKernel cell_neon_##dtype() { return make_cell<CellConfig<DType::dtype>>(Isa::neon); }
#include "cpu/kernels_of_isa.h"
#include "cpu/kernels_of_ops.inc"

}  // namespace blocksparse::lstm
