#include "ops/conv/cuda/halo/halo.cuh"

namespace blocksparse::conv {
CudaKernels cuda_halo_bf16() { return make_halo<Bf16>(DType::bf16); }
}  // namespace blocksparse::conv
