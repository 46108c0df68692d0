// Turns CUDA's errors into ours.
#pragma once

#include <cuda_runtime_api.h>

#include "core/text.h"

namespace blocksparse::cuda {

inline Status status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  if (error == cudaErrorNoKernelImageForDevice) {
    return {StatusCode::unavailable,
            concat("[cuda] ", what, ": this library holds no code for the card, nor PTX for newer ones; build it with ",
                   "the card in BLOCKSPARSE_CUDA_ARCHITECTURES, whose default has both")};
  }
  const auto code = error == cudaErrorMemoryAllocation ? StatusCode::out_of_memory : StatusCode::unavailable;
  return {code, concat("[cuda] ", what, ": ", cudaGetErrorString(error))};
}

}  // namespace blocksparse::cuda
