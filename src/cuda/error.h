// CUDA's errors as ours.
#pragma once

#include <cuda_runtime_api.h>

#include "core/text.h"

namespace blocksparse::cuda {

inline Status status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  const auto code = error == cudaErrorMemoryAllocation ? StatusCode::out_of_memory : StatusCode::unavailable;
  return {code, concat("[cuda] ", what, ": ", cudaGetErrorString(error))};
}

}  // namespace blocksparse::cuda
