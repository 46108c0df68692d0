// The cell's arithmetic on the CPU: its arguments, and the table of kernels that kernels.inc spells out. The products
// are those of the linear op.
#pragma once

#include <cstdint>

#include "blocksparse/dtype.h"
#include "cpu/isa.h"

namespace blocksparse::lstm {

// A task: one block of units of some tokens, behind the products for these.
struct CellTask {
  int64_t unit = 0;             // the first unit
  int64_t first = 0, last = 0;  // tokens
  int64_t summed = 0;           // so many tokens from `first` on have sums; the sums of the others are 0
  bool by_token = false;
  int64_t gate = 0;            // from one gate's sums to the next one's
  const void* sums = nullptr;  // Sum [gates][vectors][b][lanes], or [gates][tokens][b] (by_token), as the product
                               // kernel leaves it
};

// Plain data, because kernels are compiled for instruction sets that their caller may not use. Matrices are those of
// one step: [n, H], or [n, 4, H].
struct CellStep {
  int32_t block = 0;
  int64_t hidden = 0, t = 0, steps = 0;
  const int64_t* lengths = nullptr;  // null: all `steps`
};

struct ForwardStep : CellStep {
  const void* pre = nullptr;
  const void* c_before = nullptr;           // null: 0
  void *c = nullptr, *y = nullptr;          // c may be c_before
  void* gates = nullptr;                    // null: not kept, and c of sequences that have ended is not either
  void *h_end = nullptr, *c_end = nullptr;  // null: not wanted
};

struct BackwardStep : CellStep {
  const void *gates = nullptr, *c = nullptr, *c_before = nullptr;  // c_before null: 0
  const void* dy = nullptr;                                        // null: 0
  const void *dh_end = nullptr, *dc_end = nullptr;                 // null: 0
  void *dc = nullptr, *dpre = nullptr;
};

// of_a = x a and of_b = x b, element by element.
struct Multiply {
  int64_t count = 0;  // a multiple of 8
  const void *x = nullptr, *a = nullptr, *b = nullptr;
  void *of_a = nullptr, *of_b = nullptr;  // of_b null: not wanted
};

struct CellKernel {
  Isa isa;
  DType dtype;
  void (*forward)(const ForwardStep&, const CellTask&);    // sums of four gates
  void (*backward)(const BackwardStep&, const CellTask&);  // sums of one: the gradient from the step behind
  void (*multiply)(const Multiply&, int64_t first, int64_t last);
};

// The kernel for this instruction set, or for the next one below that has the type. It has as many lanes as the product
// kernel.
const CellKernel* find_cell_kernel(Isa isa, DType dtype);

#define BS_KERNEL(isa, dtype) CellKernel cell_##isa##_##dtype();
#include "cpu/kernels_of_ops.inc"
#undef BS_KERNEL

}  // namespace blocksparse::lstm
