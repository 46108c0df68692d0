#include "cpu/simd_avx512.h"
#include "ops/lstm/cpu/cell.h"

namespace blocksparse::lstm {

#define LSTM_CELL_avx512(dtype) \
  CellKernel cell_avx512_##dtype() { return make_cell<CellConfig<DType::dtype>>(Isa::avx512); }
#include "ops/lstm/cpu/rows_of_isa.h"

}  // namespace blocksparse::lstm
