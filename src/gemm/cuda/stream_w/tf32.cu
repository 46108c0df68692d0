#include "gemm/cuda/stream_w/rounds.cuh"

namespace blocksparse::gemm {
Status prepare_few_tf32() { return prepare_few<float>(); }
Status launch_few_tf32(const Product& p, const CudaCall& call) { return launch_few_in_rounds<float>(p, call); }
}  // namespace blocksparse::gemm
