#include "gemm/cuda/w_in_smem/kernel.cuh"

namespace blocksparse::gemm {
CudaProductKernel cuda_product_resident_bf16() { return make_resident_product<Bf16>(DType::bf16); }
}  // namespace blocksparse::gemm
