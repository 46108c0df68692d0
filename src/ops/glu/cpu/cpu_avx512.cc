#include "cpu/simd_avx512.h"
#include "ops/glu/cpu/groups.h"

namespace blocksparse::glu {

#define BS_KERNEL_avx512(dtype) \
  GroupKernel groups_avx512_##dtype() { return make_groups<DType::dtype>(Isa::avx512); }
#include "cpu/kernels_of_isa.h"
#include "cpu/kernels_of_ops.inc"

}  // namespace blocksparse::glu
