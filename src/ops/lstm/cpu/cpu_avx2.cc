#include "cpu/simd_avx2.h"
#include "ops/lstm/cpu/cell.h"

namespace blocksparse::lstm {

#define BS_KERNEL_avx2(dtype) \
  CellKernel cell_avx2_##dtype() { return make_cell<CellConfig<DType::dtype>>(Isa::avx2); }
#include "cpu/kernels_of_isa.h"
#include "cpu/kernels_of_ops.inc"

}  // namespace blocksparse::lstm
