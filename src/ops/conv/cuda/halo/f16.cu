#include "ops/conv/cuda/halo/halo.cuh"

namespace blocksparse::conv {
CudaKernels cuda_halo_f16() { return make_halo<F16>(DType::f16); }
}  // namespace blocksparse::conv
