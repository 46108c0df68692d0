#include "gemm/cuda/row_wgmma/kernel.cuh"

namespace blocksparse::gemm {
CudaProductKernel cuda_product_rows_bf16() { return make_rows_product<Bf16>(DType::bf16); }
}  // namespace blocksparse::gemm
