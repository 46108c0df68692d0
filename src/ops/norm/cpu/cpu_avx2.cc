#include "cpu/simd_avx2.h"
#include "ops/norm/cpu/rows.h"

namespace blocksparse::norm {

#define BS_KERNEL_avx2(dtype) \
  RowKernel rows_avx2_##dtype() { return make_rows<RowConfig<DType::dtype>>(Isa::avx2); }
#include "cpu/kernels_of_isa.h"
#include "cpu/kernels_of_ops.inc"

}  // namespace blocksparse::norm
