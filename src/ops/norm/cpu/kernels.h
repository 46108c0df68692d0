// The layer norm's kernels on the CPU: the table that kernels.inc spells out.
#pragma once

#include "cpu/isa.h"
#include "ops/norm/norm.h"

namespace blocksparse::norm {

inline constexpr int64_t kColumnsOfTask = 64;  // columns of a task

struct RowKernel {
  Isa isa;
  DType dtype;
  void (*forward)(const Forward&, int64_t row);
  void (*backward)(const Backward&, int64_t row);
  void (*columns)(const Backward&, int64_t group, int64_t first);  // dgain and dshift of a strip
};

// The kernel for this instruction set, or for the next one below that has the type.
const RowKernel* find_row_kernel(Isa isa, DType dtype);

#define BS_KERNEL(isa, dtype) RowKernel rows_##isa##_##dtype();
#include "cpu/kernels_of_ops.inc"
#undef BS_KERNEL

}  // namespace blocksparse::norm
