#include "gemm/cuda/stream_w_f32/kernel.cuh"

namespace blocksparse::gemm {

CudaProductKernel cuda_product_few_f32() {
  const auto prepare = [] {
    BS_RETURN_IF_ERROR(prepare_few_f32());
    return prepare_few_tf32();
  };
  const auto launch = [](const Product& p, const CudaCall& call) {
    return call.problem.tf32 ? launch_few_tf32(p, call) : launch_few_f32(p, call);
  };
  return {CudaKernel::few, DType::f32, prepare, launch};
}

}  // namespace blocksparse::gemm
