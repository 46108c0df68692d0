#include "ops/conv/cuda/gather/launch.cuh"

namespace blocksparse::conv {
CudaKernels cuda_many_bf16() { return make_many<Bf16>(DType::bf16); }
}  // namespace blocksparse::conv
