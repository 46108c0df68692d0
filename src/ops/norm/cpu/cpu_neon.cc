#include "cpu/simd_neon.h"
#include "ops/norm/cpu/rows.h"

namespace blocksparse::norm {

#define NORM_ROWS_neon(dtype) \
  RowKernel rows_neon_##dtype() { return make_rows<RowConfig<DType::dtype>>(Isa::neon); }
#include "ops/norm/cpu/rows_of_isa.h"

}  // namespace blocksparse::norm
