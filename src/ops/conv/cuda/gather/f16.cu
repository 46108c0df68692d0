#include "ops/conv/cuda/gather/launch.cuh"

namespace blocksparse::conv {
CudaKernels cuda_gather_f16() { return make_gather<F16>(DType::f16); }
}  // namespace blocksparse::conv
