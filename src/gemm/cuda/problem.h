// A call as the choice of a CUDA kernel sees it: what is known on the host, so nothing that the tables say.
#pragma once

#include <cstdint>

#include "core/ceil_div.h"
#include "cuda/card.h"
#include "gemm/product.h"

namespace blocksparse::gemm {

struct CudaProblem {
  Pass pass = Pass::fprop;
  DType dtype = DType::f32;
  int32_t block = 32;
  int64_t n = 0;        // wgrad: of all pairs
  int64_t inputs = 0;   // features that the pass reads; wgrad: in_features
  int64_t outputs = 0;  // features that it makes; wgrad: out_features
  int64_t blocks = 0;
  bool by_in = false;     // W is read transposed
  int64_t slots = 0;      // slices of split rows, at most
  bool w_aligned = true;  // W begins at a multiple of 16 bytes (wgrad: dW at one of two elements)
  bool x_in_rows = true;  // x (wgrad: all of them, and dy) has rows at multiples of 16 bytes, one behind the other
  bool x_first = false;   // rows are features (wgrad: of x and dy alike), else tokens
  bool gated = false;     // wgrad: the gates' gradient is wanted
  // wgrad: rows of W may be far longer than others, for some are cut. So say tables that were made on a card, always,
  // and those of layouts of some 30 rows, which are cut if they are but a little longer than the mean.
  bool uneven = false;
  int64_t pairs = 1;     // wgrad
  bool tf32 = false;     // f32: operands may be rounded to tf32
  bool may_fill = true;  // the family `wgmma` may copy W as if it were dense
  bool glu = false;      // outputs are gate and up of a gated linear unit

  int64_t input_blocks() const { return ceil_div(inputs, block); }
  int64_t output_blocks() const { return ceil_div(outputs, block); }
  // Blocks there are, of all that there could be.
  double density() const {
    const double grid = static_cast<double>(output_blocks()) * static_cast<double>(input_blocks());
    return static_cast<double>(blocks) / (grid > 1 ? grid : 1);
  }
};

// fprop is that with dgrad's sizes exchanged; `n` tokens (wgrad: in all).
CudaProblem cuda_problem(Pass pass, const LayoutView& layout, DType dtype, int64_t n);
// The same product ending in a gated linear unit. A copy of W as if it were dense would have sums done again, one by
// one.
CudaProblem as_glu(CudaProblem p);

inline bool in_tf32(DType dtype, Math math) { return dtype == DType::f32 && math == Math::tf32; }

// The problem of a call; of all pairs together.
CudaProblem problem_of(const Product& p, Math math);
CudaProblem problem_of(const WeightGradient& g, Math math);

}  // namespace blocksparse::gemm
