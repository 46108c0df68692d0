# Which backend answers for CUDA tensors: kernels for nvcc, or src/no_cuda.
set(BLOCKSPARSE_CUDA_ARCHITECTURES "80;90a-real" CACHE STRING
  "Cards to compile for, as in CMAKE_CUDA_ARCHITECTURES. 80 holds code for Ampere and Ada, and PTX for newer cards")
set(BLOCKSPARSE_CUDA_SOURCES src/no_cuda/cuda.cc)
set(BLOCKSPARSE_HAS_CUDA FALSE)

if(BLOCKSPARSE_CUDA STREQUAL "ON")
  enable_language(CUDA)
  set(BLOCKSPARSE_HAS_CUDA TRUE)
elseif(BLOCKSPARSE_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    set(BLOCKSPARSE_HAS_CUDA TRUE)
  endif()
endif()

if(NOT BLOCKSPARSE_HAS_CUDA)
  message(STATUS "blocksparse: CPU only; CUDA tensors are answered with `unavailable`")
  return()
endif()
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
  message(FATAL_ERROR "blocksparse: nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old, 12.0 is needed; "
    "or build with -DBLOCKSPARSE_CUDA=OFF")
endif()
message(STATUS "blocksparse: CUDA ${CMAKE_CUDA_COMPILER_VERSION} for ${BLOCKSPARSE_CUDA_ARCHITECTURES}")

# The runtime is linked statically and hidden: whatever CUDA a process has loaded besides, ours stays ours. The driver's
# library is not linked at all.
find_package(CUDAToolkit REQUIRED)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_ARCHITECTURES ${BLOCKSPARSE_CUDA_ARCHITECTURES})
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 does not know it of nvcc
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
string(APPEND CMAKE_CUDA_FLAGS " --expt-relaxed-constexpr")
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)  # every driver that takes its code knows this compression
  string(APPEND CMAKE_CUDA_FLAGS " --compress-mode=size")   # a fifth of the default's
endif()
if(BLOCKSPARSE_LINEINFO)
  string(APPEND CMAKE_CUDA_FLAGS " -lineinfo")
endif()
# Every kernel still passes through cicc and ptxas, which refuse what they refuse otherwise. Of row_wgmma/f16.cu cicc
# took 34 s and ptxas 93, so they take 4 and 6. ptxas -O0 alone made nothing quicker.
set(BLOCKSPARSE_IS_SLOW 0)
if(BLOCKSPARSE_QUICK_NVCC AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.9)
  string(APPEND CMAKE_CUDA_FLAGS " --Ofast-compile=max")
  set(BLOCKSPARSE_IS_SLOW 1)
endif()
set(BLOCKSPARSE_CUDA_SOURCES
  src/cuda/build_index.cu
  src/cuda/card.cc
  src/cuda/memory.cc
  src/cuda/tensor_map.cc
  src/gemm/cuda/driver.cc
  src/gemm/cuda/forced.cc
  src/gemm/cuda/walk.cc
  src/ops/bias/cuda/sum.cu
  src/ops/conv/cuda/driver.cc
  src/ops/conv/cuda/gather/taps.cu
  src/ops/conv/cuda/generic/bf16.cu
  src/ops/conv/cuda/generic/f16.cu
  src/ops/conv/cuda/generic/f32.cu
  src/ops/conv/cuda/generic/f64.cu
  src/ops/conv/cuda/order/copy.cu
  src/ops/cuda_kernels.cc
  src/ops/glu/cuda/groups.cu
  src/ops/lstm/cuda/cell.cu
  src/ops/lstm/cuda/driver.cc
  src/ops/lstm/cuda/w_in_smem/kernel.cu
  src/ops/norm/cuda/cell.cu
  src/ops/norm/cuda/columns.cu
  src/ops/norm/cuda/rows.cu)
# Kernels for 90a alone are empty in code for other cards, so the choice must know whether there is such code.
set(BLOCKSPARSE_SM90A 0)
if("${BLOCKSPARSE_CUDA_ARCHITECTURES}" MATCHES "(^|;)90(;|-|$)")
  message(FATAL_ERROR "blocksparse: BLOCKSPARSE_CUDA_ARCHITECTURES is ${BLOCKSPARSE_CUDA_ARCHITECTURES}; "
    "for compute capability 9.0 say 90a, without which the fast kernels have no code")
endif()
if("${BLOCKSPARSE_CUDA_ARCHITECTURES}" MATCHES "native|all")
  message(FATAL_ERROR "blocksparse: BLOCKSPARSE_CUDA_ARCHITECTURES is ${BLOCKSPARSE_CUDA_ARCHITECTURES}; "
    "name the cards, as in 80;90a-real, for these words never mean 90a, without which the fast kernels have no code")
endif()
if("${BLOCKSPARSE_CUDA_ARCHITECTURES}" MATCHES "90a")
  set(BLOCKSPARSE_SM90A 1)
endif()
set_source_files_properties(src/cuda/card.cc PROPERTIES COMPILE_DEFINITIONS
  "BLOCKSPARSE_SM90A=${BLOCKSPARSE_SM90A};BLOCKSPARSE_IS_SLOW=${BLOCKSPARSE_IS_SLOW}")
