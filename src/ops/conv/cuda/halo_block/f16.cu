#include "ops/conv/cuda/halo_block/kernel.cuh"

namespace blocksparse::conv {
CudaKernels cuda_halo_block_f16() { return make_halo_block<F16>(DType::f16); }
}  // namespace blocksparse::conv
