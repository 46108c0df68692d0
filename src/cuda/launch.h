// Launches kernels, and prepares them for launches.
#pragma once

#include <cuda_runtime.h>

#include "cuda/error.h"

namespace blocksparse::cuda {

struct Launch {
  int64_t blocks = 1;  // at most 2^31 - 1 are launched: a kernel that may need more walks in steps of the grid
  int threads = 128;
  int shared_bytes = 0;
  cudaStream_t stream = nullptr;
  bool overlap = false;      // may begin before the kernel before it has ended: only kernels with griddepcontrol.wait
  bool cooperative = false;  // all thread blocks are resident at once, or the launch fails
  int cluster = 1;           // thread blocks of a cluster (from 9.0 on)
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

// Loads a kernel, so that its first launch may be captured in a graph, and allows it `shared_bytes` of shared memory.
template <class... Parameters>
Status prepare(void (*kernel)(Parameters...), int shared_bytes) {
  return status_of(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                   "prepare");
}

// Prepares a kernel of which several thread blocks shall fit an SM. Without this the driver may set aside shared memory
// for one of them only.
template <class... Parameters>
Status prepare_for_many(void (*kernel)(Parameters...), int shared_bytes) {
  BS_RETURN_IF_ERROR(prepare(kernel, shared_bytes));
  return status_of(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
                   "prepare");
}

// Whether griddepcontrol is in the code of a kernel that the current device runs. It is missing if the driver made that
// code from PTX for an older card.
template <class... Parameters>
bool has_griddepcontrol(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes{};
  const auto* pointer = reinterpret_cast<const void*>(kernel);
  return cudaFuncGetAttributes(&attributes, pointer) == cudaSuccess && attributes.ptxVersion >= 90;
}

}  // namespace blocksparse::cuda
