#include "cpu/simd_avx2.h"
#include "ops/norm/cpu/rows.h"

namespace blocksparse::norm {

#define NORM_ROWS_avx2(dtype) \
  RowKernel rows_avx2_##dtype() { return make_rows<RowConfig<DType::dtype>>(Isa::avx2); }
#include "ops/norm/cpu/rows_of_isa.h"

}  // namespace blocksparse::norm
