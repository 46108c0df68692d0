#include "ops/conv/cuda/generic/gradient.cuh"

namespace blocksparse::conv {
CudaKernels cuda_generic_f64() { return make_generic<double>(DType::f64); }
}  // namespace blocksparse::conv
