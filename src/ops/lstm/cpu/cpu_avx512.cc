#include "cpu/simd_avx512.h"
#include "ops/lstm/cpu/cell.h"

namespace blocksparse::lstm {

#define BS_KERNEL_avx512(dtype) \
  CellKernel cell_avx512_##dtype() { return make_cell<CellConfig<DType::dtype>>(Isa::avx512); }
#include "cpu/kernels_of_isa.h"
#include "cpu/kernels_of_ops.inc"

}  // namespace blocksparse::lstm
