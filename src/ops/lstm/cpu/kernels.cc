#include "ops/lstm/cpu/kernels.h"

#include <vector>

namespace blocksparse::lstm {

const CellKernel* find_cell_kernel(Isa isa, DType dtype) {
  static const std::vector<CellKernel> kernels = {
#define LSTM_CELL(isa, dtype) cell_##isa##_##dtype(),
#include "ops/lstm/cpu/kernels.inc"
#undef LSTM_CELL
  };
  return find_kernel(std::span<const CellKernel>(kernels), isa, dtype);
}

}  // namespace blocksparse::lstm
