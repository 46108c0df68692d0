// The rows of kernels.inc that belong to the including file, which has defined LSTM_CELL_<isa> for its own instruction
// set; the others expand to nothing. No include guard: it is an expansion.
#if !defined(LSTM_CELL_scalar)
#define LSTM_CELL_scalar(...)
#endif
#if !defined(LSTM_CELL_avx2)
#define LSTM_CELL_avx2(...)
#endif
#if !defined(LSTM_CELL_avx512)
#define LSTM_CELL_avx512(...)
#endif
#if !defined(LSTM_CELL_neon)
#define LSTM_CELL_neon(...)
#endif

#define LSTM_CELL(isa, dtype) LSTM_CELL_##isa(dtype)
#include "ops/lstm/cpu/kernels.inc"
