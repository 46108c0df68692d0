#include "cpu/simd_scalar.h"
#include "ops/lstm/cpu_cell.h"

namespace blocksparse::lstm {

#define LSTM_CELL_scalar(dtype) \
  CellKernel cell_scalar_##dtype() { return make_cell<CellConfig<DType::dtype>>(Isa::scalar); }
#include "ops/lstm/rows_of_isa.h"

}  // namespace blocksparse::lstm
