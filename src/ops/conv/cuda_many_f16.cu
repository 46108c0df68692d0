#include "ops/conv/cuda_many.h"

namespace blocksparse::conv {
CudaKernels cuda_many_f16() { return make_many<F16>(DType::f16); }
}  // namespace blocksparse::conv
