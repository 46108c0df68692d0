#include "cpu/simd_avx2.h"
#include "ops/glu/cpu/groups.h"

namespace blocksparse::glu {

#define BS_KERNEL_avx2(dtype) \
  GroupKernel groups_avx2_##dtype() { return make_groups<DType::dtype>(Isa::avx2); }
#include "cpu/kernels_of_isa.h"
#include "cpu/kernels_of_ops.inc"

}  // namespace blocksparse::glu
