#include "gemm/cuda/w_in_smem/kernel.cuh"

namespace blocksparse::gemm {
CudaProductKernel cuda_product_resident_f16() { return make_resident_product<F16>(DType::f16); }
}  // namespace blocksparse::gemm
