// Starting kernels.
#pragma once

#include <cuda_runtime.h>

#include "cuda/error.h"

namespace blocksparse::cuda {

struct Launch {
  int64_t blocks = 1;  // kernels walk their work in steps of the grid, so a grid may be smaller than the work
  int threads = 128;
  int shared_bytes = 0;
  cudaStream_t stream = nullptr;
};

template <class... Parameters, class... Args>
Status launch(const Launch& l, void (*kernel)(Parameters...), const Args&... args) {
  constexpr int64_t kMostBlocks = 0x7fffffff;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(l.blocks, kMostBlocks)));
  config.blockDim = dim3(static_cast<unsigned>(l.threads));
  config.dynamicSmemBytes = static_cast<size_t>(l.shared_bytes);
  config.stream = l.stream;
  return status_of(cudaLaunchKernelEx(&config, kernel, args...), "launch");
}

// Loads a kernel, so that its first launch may be captured in a graph, and lets it use so much shared memory.
template <class... Parameters>
Status prepare(void (*kernel)(Parameters...), int shared_bytes) {
  return status_of(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                   "prepare");
}

}  // namespace blocksparse::cuda
