// A call as the choice of a CUDA kernel sees it: what the host knows without reading the tables.
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
  int64_t n = 0;        // wgrad: tokens of all pairs
  int64_t inputs = 0;   // features that the pass reads; wgrad: in_features
  int64_t outputs = 0;  // features that the pass makes; wgrad: out_features
  int64_t blocks = 0;
  bool by_in = false;     // W is read transposed
  int64_t slots = 0;      // slices of split rows, at most
  bool w_aligned = true;  // W begins at a multiple of 16 bytes (wgrad: dW at a multiple of two elements)
  bool x_in_rows = true;  // rows of x (wgrad: of all x and dy) begin at multiples of 16 bytes and do not overlap
  bool x_first = false;   // rows of x (wgrad: of x and dy alike) are features, otherwise tokens
  bool gated = false;     // there are gates (wgrad: their gradient is wanted)
  // wgrad: some rows of W are cut, so rows may be much longer than others. Tables that a card made always say so, and
  // those of layouts of some 30 rows, which are cut if they are a little longer than the mean.
  bool uneven = false;
  int64_t pairs = 1;     // wgrad
  bool tf32 = false;     // f32: operands may be rounded to tf32
  bool may_fill = true;  // the family `wgmma` may copy W with zeros for missing blocks, as if it were dense
  bool glu = false;      // outputs are gate and up of a gated linear unit

  bool quarters_are_alike = false;  // as Product says

  int64_t input_blocks() const { return ceil_div(inputs, block); }
  int64_t output_blocks() const { return ceil_div(outputs, block); }
  // Blocks that exist, divided by all blocks of the grid.
  double density() const {
    const double grid = static_cast<double>(output_blocks()) * static_cast<double>(input_blocks());
    return static_cast<double>(blocks) / (grid > 1 ? grid : 1);
  }
};

// The problem of a pass for `n` tokens (wgrad: of all pairs). fprop and dgrad differ in which sizes are inputs.
CudaProblem cuda_problem(Pass pass, const LayoutView& layout, DType dtype, int64_t n);
// The problem with a gated linear unit as its epilogue. W is not filled up for it: sums would have to be corrected one
// by one.
CudaProblem as_glu(CudaProblem p);

inline bool in_tf32(DType dtype, Math math) { return dtype == DType::f32 && math == Math::tf32; }

// The problem of a call, with all pairs together.
CudaProblem problem_of(const Product& p, Math math);
CudaProblem problem_of(const WeightGradient& g, Math math);

}  // namespace blocksparse::gemm
