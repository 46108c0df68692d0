#include "cpu/simd_neon.h"
#include "ops/norm/cpu/rows.h"

namespace blocksparse::norm {

#define BS_KERNEL_neon(dtype) \
  RowKernel rows_neon_##dtype() { return make_rows<RowConfig<DType::dtype>>(Isa::neon); }
#include "cpu/kernels_of_isa.h"
#include "cpu/kernels_of_ops.inc"

}  // namespace blocksparse::norm
