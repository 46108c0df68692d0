// Whether one CUDA kernel was asked for: see set_cuda_kernel.
#pragma once

#include <optional>

#include "blocksparse/status.h"
#include "gemm/cuda/select.h"

namespace blocksparse::gemm {

Result<std::optional<CudaKernel>> forced_cuda_kernel();
bool cuda_kernel_is_forced();
bool halo_is_forced();  // the convolution's way of that name; then it is none of these kernels

}  // namespace blocksparse::gemm
