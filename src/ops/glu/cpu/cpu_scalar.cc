#include "cpu/simd_scalar.h"
#include "ops/glu/cpu/groups.h"

namespace blocksparse::glu {

#define BS_KERNEL_scalar(dtype) \
  GroupKernel groups_scalar_##dtype() { return make_groups<DType::dtype>(Isa::scalar); }
#include "cpu/kernels_of_isa.h"
#include "cpu/kernels_of_ops.inc"

}  // namespace blocksparse::glu
