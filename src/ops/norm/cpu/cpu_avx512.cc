#include "cpu/simd_avx512.h"
#include "ops/norm/cpu/rows.h"

namespace blocksparse::norm {

#define BS_KERNEL_avx512(dtype) \
  RowKernel rows_avx512_##dtype() { return make_rows<RowConfig<DType::dtype>>(Isa::avx512); }
#include "cpu/kernels_of_isa.h"
#include "cpu/kernels_of_ops.inc"

}  // namespace blocksparse::norm
