// How a product on the CPU is divided. Pure functions of the problem, so they are tested for machines that are not
// here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "blocksparse/dtype.h"
#include "cpu/isa.h"
#include "gemm/product.h"

namespace blocksparse::gemm {

// What the choice looks at.
struct Problem {
  Pass pass = Pass::fprop;
  DType dtype = DType::f32;
  int32_t block = 32;
  int64_t n = 0;
  int64_t inputs = 0;   // features that the pass reads: in_features in fprop, out_features in dgrad
  int64_t outputs = 0;  // features that it makes
  int64_t slots = 0;    // slices of split rows
  bool x_features_first = false;
  int64_t x_feature_stride = 0;  // 0: not known, workspace is to suffice for any
  bool side_by_side = false;     // the kernel packs x for tiles of vectors
  int64_t weights = 0;           // of all blocks, for that
};

struct ProductPlan {
  int64_t round = 0;    // tokens that are packed and then multiplied, a multiple of `group`
  int64_t group = 0;    // tokens of a task
  bool few = false;     // vectors along features rather than tokens: nothing is packed
  bool direct = false;  // x is read where it lies: no packing but for the last, incomplete vector
  size_t panel_bytes = 0, partial_bytes = 0;
  int64_t staged_tokens = 0;  // whose sums may wait to be written to features-last y
  size_t staged_bytes = 0;

  size_t workspace_bytes() const;
};

struct GradientPlan {
  int64_t round = 0;  // tokens that are packed and then multiplied
  size_t panel_bytes = 0;
  size_t sums_bytes = 0;  // f32 sums of all blocks, where dW is narrower and there is more than one round

  size_t workspace_bytes() const;
};

// Whether vectors of so many bytes run along outputs of features-last x and y, for blocks of `smallest` (0: none) and
// more.
bool runs_along_outputs(const Product& p, int32_t smallest, int64_t vector_bytes, const Cpu& cpu);
// Tokens that they do at a time, of so many bytes each.
int64_t group_along_outputs(int64_t token_bytes);

// The same for AMX, whose dgrad copies a chunk of W once for a group; `round` tokens are packed.
int64_t group_of_tiles(const Product& p, int64_t round);

// Whether they read a copy of x, where the kernel can.
bool packs_tokens(const Product& p, int64_t vector_bytes);

// Whether dgrad of blocks of 8 asks for the next one just before it is used.
bool asks_again(const Cpu& cpu);

// Whether one token leaves W of blocks of 32 and more to the hardware.
bool leaves_large_unasked(int64_t vector_bytes, const Cpu& cpu);

ProductPlan plan_product(const Problem& problem);

struct Shares {
  int64_t tokens = 0;    // of a round
  int64_t group = 0;     // of a task that takes some pieces
  int64_t smallest = 0;  // of a task that takes all of them
  int64_t weight_bytes = 0;
  int32_t threads = 1;
};
// How many tokens a thread does by itself at a time; 0: threads share the pieces of a group.
int64_t group_of_thread(const Shares& s);
GradientPlan plan_gradient(const Problem& problem, DType dw_dtype, int64_t blocks);
// Whether wgrad reads x and dy where they lie, with vectors of so many bytes.
bool reads_tokens_in_place(const WeightGradient& g, int64_t vector_bytes);
// Whether it then copies dy of each row of blocks.
bool copies_dy(int64_t vector_bytes, const Cpu& cpu);
// Whether it reads features-first dy where it lies, and packs x alone.
bool reads_dy_in_place(const WeightGradient& g);
// Tokens that are packed and summed at a time, of the `most` that there is room for.
int64_t gradient_round(const WeightGradient& g, int64_t most, int64_t vector_bytes);

}  // namespace blocksparse::gemm
