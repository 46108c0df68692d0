#include "cpu/simd_neon.h"
#include "ops/lstm/cpu/cell.h"

namespace blocksparse::lstm {

#define LSTM_CELL_neon(dtype) \
  CellKernel cell_neon_##dtype() { return make_cell<CellConfig<DType::dtype>>(Isa::neon); }
#include "ops/lstm/cpu/rows_of_isa.h"

}  // namespace blocksparse::lstm
