#include "cpu/simd_scalar.h"
#include "ops/norm/cpu/rows.h"

namespace blocksparse::norm {

#define BS_KERNEL_scalar(dtype) \
  RowKernel rows_scalar_##dtype() { return make_rows<RowConfig<DType::dtype>>(Isa::scalar); }
#include "cpu/kernels_of_isa.h"
#include "cpu/kernels_of_ops.inc"

}  // namespace blocksparse::norm
