#include "ops/conv/cuda/generic/gradient.cuh"

namespace blocksparse::conv {
CudaKernels cuda_generic_bf16() { return make_generic<Bf16>(DType::bf16); }
}  // namespace blocksparse::conv
