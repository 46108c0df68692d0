# Which backend answers for CUDA tensors.
if(BLOCKSPARSE_CUDA STREQUAL "ON")
  message(FATAL_ERROR "BLOCKSPARSE_CUDA=ON: this version holds no CUDA kernels yet; use AUTO or OFF")
endif()
set(BLOCKSPARSE_CUDA_SOURCES src/no_cuda/cuda.cc)
message(STATUS "blocksparse: CPU only; CUDA tensors are answered with `unavailable`")
