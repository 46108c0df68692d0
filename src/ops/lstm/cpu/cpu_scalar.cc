#include "cpu/simd_scalar.h"
#include "ops/lstm/cpu/cell.h"

namespace blocksparse::lstm {

#define BS_KERNEL_scalar(dtype) \
  CellKernel cell_scalar_##dtype() { return make_cell<CellConfig<DType::dtype>>(Isa::scalar); }
#include "cpu/kernels_of_isa.h"
#include "cpu/kernels_of_ops.inc"

}  // namespace blocksparse::lstm
