#include "gemm/cuda/row_wgmma/kernel.cuh"

namespace blocksparse::gemm {
CudaProductKernel cuda_product_rows_f16() { return make_rows_product<F16>(DType::f16); }
}  // namespace blocksparse::gemm
