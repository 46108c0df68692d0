#include "ops/conv/cuda/generic/gradient.cuh"

namespace blocksparse::conv {
CudaKernels cuda_generic_f32() { return make_generic<float>(DType::f32); }
}  // namespace blocksparse::conv
