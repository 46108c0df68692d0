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
set(BLOCKSPARSE_CUDA_SOURCES
  src/cuda/build_index.cu
  src/cuda/card.cc
  src/cuda/memory.cc
  src/cuda/tensor_map.cc
  src/ops/conv/cuda.cc
  src/ops/conv/cuda_generic_bf16.cu
  src/ops/conv/cuda_generic_f16.cu
  src/ops/conv/cuda_generic_f32.cu
  src/ops/conv/cuda_generic_f64.cu
  src/ops/conv/cuda_halo_bf16.cu
  src/ops/conv/cuda_halo_f16.cu
  src/ops/conv/cuda_many_bf16.cu
  src/ops/conv/cuda_many_f16.cu
  src/ops/conv/cuda_order.cu
  src/ops/conv/cuda_taps.cu
  src/ops/cuda_prepare.cc
  src/ops/linear/cuda.cc
  src/ops/linear/cuda_few_bf16.cu
  src/ops/linear/cuda_few_f16.cu
  src/ops/linear/cuda_few_f32.cu
  src/ops/linear/cuda_few_tf32.cu
  src/ops/linear/cuda_few_gradient_bf16.cu
  src/ops/linear/cuda_few_gradient_f16.cu
  src/ops/linear/cuda_few_gradient_f32.cu
  src/ops/linear/cuda_few_gradient_pack.cu
  src/ops/linear/cuda_few_pack.cu
  src/ops/linear/cuda_generic_bf16.cu
  src/ops/linear/cuda_generic_f16.cu
  src/ops/linear/cuda_generic_f32.cu
  src/ops/linear/cuda_generic_f64.cu
  src/ops/linear/cuda_many_bf16.cu
  src/ops/linear/cuda_many_f16.cu
  src/ops/linear/cuda_many_pack.cu
  src/ops/linear/cuda_many_units.cu
  src/ops/linear/cuda_many_walk.cu
  src/ops/linear/cuda_region_units.cu
  src/ops/linear/cuda_regions_bf16.cu
  src/ops/linear/cuda_regions_f16.cu
  src/ops/linear/cuda_resident_bf16.cu
  src/ops/linear/cuda_resident_f16.cu
  src/ops/linear/cuda_rows_bf16.cu
  src/ops/linear/cuda_rows_f16.cu
  src/ops/linear/cuda_sweep_bf16.cu
  src/ops/linear/cuda_sweep_f16.cu
  src/ops/linear/cuda_tiled_f32.cu
  src/ops/linear/cuda_tiled_tables.cu
  src/ops/linear/cuda_tiled_tf32.cu
  src/ops/lstm/cuda.cc
  src/ops/lstm/cuda_cell.cu
  src/ops/lstm/cuda_resident.cu
  src/ops/norm/cuda.cu
  src/ops/norm/cuda_cell.cu
  src/ops/norm/cuda_wide.cu)
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
set_source_files_properties(src/cuda/card.cc PROPERTIES COMPILE_DEFINITIONS BLOCKSPARSE_SM90A=${BLOCKSPARSE_SM90A})
