#include "ops/conv/cuda/generic/gradient.cuh"

namespace blocksparse::conv {
CudaKernels cuda_generic_f16() { return make_generic<F16>(DType::f16); }
}  // namespace blocksparse::conv
