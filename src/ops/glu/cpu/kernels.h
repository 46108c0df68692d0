// The pointwise kernels of gated linear units on the CPU: the table that kernels_of_ops.inc spells out.
#pragma once

#include "cpu/isa.h"
#include "ops/glu/glu.h"

namespace blocksparse::glu {

// Computes groups of kInterleaved hidden features, [first, last), of one token.
struct GroupKernel {
  Isa isa;
  DType dtype;
  void (*forward)(const Forward&, int64_t token, int64_t first, int64_t last);
  void (*backward)(const Backward&, int64_t token, int64_t first, int64_t last);
};

// The kernel for this instruction set, or for the next one below that has the type.
const GroupKernel* find_group_kernel(Isa isa, DType dtype);

#define BS_KERNEL(isa, dtype) GroupKernel groups_##isa##_##dtype();
#include "cpu/kernels_of_ops.inc"
#undef BS_KERNEL

}  // namespace blocksparse::glu
