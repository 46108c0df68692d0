#include "ops/linear/cuda_many.h"

namespace blocksparse::linear {
CudaProductKernel cuda_product_many_bf16() { return make_many_product<Bf16>(DType::bf16); }
}  // namespace blocksparse::linear
