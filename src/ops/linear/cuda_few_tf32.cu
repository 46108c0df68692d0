#include "ops/linear/cuda_few_f32.h"

namespace blocksparse::linear {
Status prepare_few_tf32() { return prepare_few_f32<true>(); }
Status launch_few_tf32(const Product& p, const CudaCall& call) { return launch_few_f32<true>(p, call); }
}  // namespace blocksparse::linear
