#include "ops/conv/cuda/gather/launch.cuh"

namespace blocksparse::conv {
CudaKernels cuda_gather_bf16() { return make_gather<Bf16>(DType::bf16); }
}  // namespace blocksparse::conv
