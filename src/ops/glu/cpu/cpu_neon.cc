#include "cpu/simd_neon.h"
#include "ops/glu/cpu/groups.h"

namespace blocksparse::glu {

#define BS_KERNEL_neon(dtype) \
  GroupKernel groups_neon_##dtype() { return make_groups<DType::dtype>(Isa::neon); }
#include "cpu/kernels_of_isa.h"
#include "cpu/kernels_of_ops.inc"

}  // namespace blocksparse::glu
