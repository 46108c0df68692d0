#include "ops/linear/cuda_resident.h"

namespace blocksparse::linear {
CudaProductKernel cuda_product_resident_bf16() { return make_resident_product<Bf16>(DType::bf16); }
}  // namespace blocksparse::linear
