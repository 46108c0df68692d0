#include "gemm/cuda/stream_w/rounds.cuh"

namespace blocksparse::gemm {
CudaProductKernel cuda_product_few_f16() { return make_few_product<F16>(DType::f16); }
}  // namespace blocksparse::gemm
