#include "cpu/simd_scalar.h"
#include "ops/norm/cpu/rows.h"

namespace blocksparse::norm {

#define NORM_ROWS_scalar(dtype) \
  RowKernel rows_scalar_##dtype() { return make_rows<RowConfig<DType::dtype>>(Isa::scalar); }
#include "ops/norm/cpu/rows_of_isa.h"

}  // namespace blocksparse::norm
