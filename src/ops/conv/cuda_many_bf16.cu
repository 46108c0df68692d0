#include "ops/conv/cuda_many.h"

namespace blocksparse::conv {
CudaKernels cuda_many_bf16() { return make_many<Bf16>(DType::bf16); }
}  // namespace blocksparse::conv
