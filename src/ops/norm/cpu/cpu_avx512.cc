#include "cpu/simd_avx512.h"
#include "ops/norm/cpu/rows.h"

namespace blocksparse::norm {

#define NORM_ROWS_avx512(dtype) \
  RowKernel rows_avx512_##dtype() { return make_rows<RowConfig<DType::dtype>>(Isa::avx512); }
#include "ops/norm/cpu/rows_of_isa.h"

}  // namespace blocksparse::norm
