#include "ops/conv/cuda/halo_block/kernel.cuh"

namespace blocksparse::conv {
CudaKernels cuda_halo_block_bf16() { return make_halo_block<Bf16>(DType::bf16); }
}  // namespace blocksparse::conv
