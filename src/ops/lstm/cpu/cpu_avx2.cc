#include "cpu/simd_avx2.h"
#include "ops/lstm/cpu/cell.h"

namespace blocksparse::lstm {

#define LSTM_CELL_avx2(dtype) \
  CellKernel cell_avx2_##dtype() { return make_cell<CellConfig<DType::dtype>>(Isa::avx2); }
#include "ops/lstm/cpu/rows_of_isa.h"

}  // namespace blocksparse::lstm
