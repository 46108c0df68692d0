#include "ops/conv/cuda/gather/launch.cuh"

namespace blocksparse::conv {
CudaKernels cuda_many_f16() { return make_many<F16>(DType::f16); }
}  // namespace blocksparse::conv
