#include "cpu/simd_scalar.h"
#include "ops/norm/cpu_rows.h"

namespace blocksparse::norm {

#define NORM_ROWS_scalar(dtype) \
  RowKernel rows_scalar_##dtype() { return make_rows<RowConfig<DType::dtype>>(Isa::scalar); }
#include "ops/norm/rows_of_isa.h"

}  // namespace blocksparse::norm
