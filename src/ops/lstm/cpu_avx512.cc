#include "cpu/simd_avx512.h"
#include "ops/lstm/cpu_cell.h"

namespace blocksparse::lstm {

#define LSTM_CELL_avx512(dtype) \
  CellKernel cell_avx512_##dtype() { return make_cell<CellConfig<DType::dtype>>(Isa::avx512); }
#include "ops/lstm/rows_of_isa.h"

}  // namespace blocksparse::lstm
