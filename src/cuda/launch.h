// Starting kernels.
#pragma once

#include <cuda_runtime.h>

#include "cuda/error.h"

namespace blocksparse::cuda {

struct Launch {
  int64_t blocks = 1;  // at most 2^31 - 1 are launched: where there may be more, kernels walk in steps of the grid
  int threads = 128;
  int shared_bytes = 0;
  cudaStream_t stream = nullptr;
  bool overlap = false;      // may begin before the kernel in front has ended: only code with griddepcontrol.wait in it
  bool cooperative = false;  // all thread blocks are resident at once, or the launch fails
  int cluster = 1;           // thread blocks side by side that may read each other's shared memory: from 9.0 on
};

template <class... Parameters, class... Args>
Status launch(const Launch& l, void (*kernel)(Parameters...), const Args&... args) {
  constexpr int64_t kMostBlocks = 0x7fffffff;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(l.blocks, kMostBlocks)));
  config.blockDim = dim3(static_cast<unsigned>(l.threads));
  config.dynamicSmemBytes = static_cast<size_t>(l.shared_bytes);
  config.stream = l.stream;
  cudaLaunchAttribute attributes[3] = {};
  const auto add = [&]() -> cudaLaunchAttribute& { return attributes[config.numAttrs++]; };
  config.attrs = attributes;
  if (l.overlap) {
    auto& overlap = add();
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (l.cooperative) {
    auto& cooperative = add();
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
  }
  if (l.cluster > 1) {
    auto& cluster = add();
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {.x = static_cast<unsigned>(l.cluster), .y = 1, .z = 1};
  }
  return status_of(cudaLaunchKernelEx(&config, kernel, args...), "launch");
}

// Loads a kernel, so that its first launch may be captured in a graph, and lets it use so much shared memory.
template <class... Parameters>
Status prepare(void (*kernel)(Parameters...), int shared_bytes) {
  return status_of(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                   "prepare");
}

// The same of a kernel of which several thread blocks shall fit an SM: left alone, the driver may set aside shared
// memory for one of them.
template <class... Parameters>
Status prepare_for_many(void (*kernel)(Parameters...), int shared_bytes) {
  BS_RETURN_IF_ERROR(prepare(kernel, shared_bytes));
  return status_of(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
                   "prepare");
}

// Whether griddepcontrol is in the code of a kernel that the current device runs. It is not where the driver has made
// that code of PTX for an older card.
template <class... Parameters>
bool has_griddepcontrol(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes{};
  const auto* pointer = reinterpret_cast<const void*>(kernel);
  return cudaFuncGetAttributes(&attributes, pointer) == cudaSuccess && attributes.ptxVersion >= 90;
}

}  // namespace blocksparse::cuda
