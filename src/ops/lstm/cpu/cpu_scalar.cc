#include "cpu/simd_scalar.h"
#include "ops/lstm/cpu/cell.h"

namespace blocksparse::lstm {

#define LSTM_CELL_scalar(dtype) \
  CellKernel cell_scalar_##dtype() { return make_cell<CellConfig<DType::dtype>>(Isa::scalar); }
#include "ops/lstm/cpu/rows_of_isa.h"

}  // namespace blocksparse::lstm
