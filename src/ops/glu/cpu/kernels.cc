#include "ops/glu/cpu/kernels.h"

#include <span>

namespace blocksparse::glu {

const GroupKernel* find_group_kernel(Isa isa, DType dtype) {
  static const GroupKernel kKernels[] = {
#define BS_KERNEL(isa, dtype) groups_##isa##_##dtype(),
#include "cpu/kernels_of_ops.inc"
#undef BS_KERNEL
  };
  return find_kernel(std::span<const GroupKernel>(kKernels), isa, dtype);
}

}  // namespace blocksparse::glu
