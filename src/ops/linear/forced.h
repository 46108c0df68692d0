// Whether one CUDA kernel was asked for: see set_cuda_kernel.
#pragma once

namespace blocksparse::linear {

bool cuda_kernel_is_forced();

}  // namespace blocksparse::linear
